"""Names with an uncertain meaning: the user must decide only if the changes differ between the meanings."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Finding
from hvdkit_migrate.names import Unclear
from hvdkit_migrate.script import Script


def resolve_ambiguity(script: Script, find: Callable[[Script], list[Finding]]) -> tuple[Script, list[Unclear]]:
    """Assign a name its first meaning if all its meanings have the same findings; return the other names too.

    find: returns the findings of a script. It is called only for a script with such names.
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
    """Report that the user must clarify these names: no change that depends on them is made."""
    for one in names:
        name, lines = one.key[1], f"line{'s' * (len(one.lines) > 1)} {', '.join(map(str, one.lines))}"
        meanings = ", ".join(full or "a definition of this file" for full in one.candidates)
        if one.is_star:
            module = one.candidates[0].rpartition(".")[0]
            what = f"`{name}` can only come from the star import of {lines}, whose names are not visible."
            write = f"from {module} import {name}, in place of the star import"
        else:
            what = f"`{name}` is one of: {meanings} ({lines}). The change depends on which."
            write = "different names for them; or the comment `# hvdkit: ok` here, and the changes by hand"
        draft.breaks(_whole(draft, one.use), what, write)


def _whole(draft: Draft, name: cst.CSTNode) -> cst.CSTNode:
    """Return the chain of attributes that begins with a name."""
    above = draft.script.parent(name)
    return _whole(draft, above) if isinstance(above, cst.Attribute) else name
