"""Names whose meaning is not certain: what to change for each meaning decides whether a person is asked."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from hvdkit.tools.migrate.draft import Draft
from hvdkit.tools.migrate.finding import Finding
from hvdkit.tools.migrate.names import Unclear
from hvdkit.tools.migrate.script import Script


def settle(script: Script, find: Callable[[Script], list[Finding]]) -> tuple[Script, list[Unclear]]:
    """Give a name its first meaning where every meaning has the same findings; return the other names too.

    find: the findings of a script. A script without such names is not looked at.
    """
    open_names = []
    for one in script.names.unclear():
        outcomes = [find(script.assuming(one, meaning)) for meaning in one.candidates]
        if all(outcome == outcomes[0] for outcome in outcomes):
            script = script.assuming(one, one.candidates[0])
        else:
            open_names.append(one)
    return script, open_names


def report_unclear(draft: Draft, names: list[Unclear]) -> None:
    """Ask a person what these names stand for: nothing is changed that hangs on them."""
    for one in names:
        name, lines = one.key[1], f"line{'s' * (len(one.lines) > 1)} {', '.join(map(str, one.lines))}"
        meanings = ", ".join(full or "what this file defines" for full in one.candidates)
        if one.is_star:
            module = one.candidates[0].rpartition(".")[0]
            what = f"`{name}` is bound by nothing but the star import of {lines}, which does not show its names."
            write = f"from {module} import {name}, in place of the star import"
        else:
            what = f"`{name}` may be one of: {meanings} ({lines}). What has to change here depends on it."
            write = "another name for one of them; or the comment `# hvdkit: ok` here, and the changes by hand"
        draft.breaks(_whole(draft, one.use), what, write)


def _whole(draft: Draft, name: cst.CSTNode) -> cst.CSTNode:
    """The chain of attributes that a name begins."""
    above = draft.script.parent(name)
    return _whole(draft, above) if isinstance(above, cst.Attribute) else name
