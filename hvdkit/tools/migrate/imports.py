"""Imports that a migrated script no longer uses."""

from __future__ import annotations

import libcst as cst

from hvdkit.tools.migrate.draft import Draft
from hvdkit.tools.migrate.names import dotted_name
from hvdkit.tools.migrate.script import matches


def drop_unused(draft: Draft, modules: tuple[str, ...]) -> None:
    """Delete import lines of which all names are from `modules`, and stand in nothing that stays."""
    script = draft.script
    gone = [(edit.start, edit.end) for finding in draft.findings for edit in finding.edits if edit.end > edit.start]
    names = {name for one in modules for name in (one, one + ".")}
    for statement in script.all(cst.SimpleStatementLine):
        imports = [one for one in statement.body if isinstance(one, (cst.Import, cst.ImportFrom))]
        if len(imports) != 1 or len(statement.body) != 1:
            continue
        one = imports[0]
        if isinstance(one.names, cst.ImportStar):
            continue
        module = dotted_name(one.module) + "." if isinstance(one, cst.ImportFrom) else ""
        if not all(matches(module + dotted_name(alias.name), names) for alias in one.names):
            continue
        local = {dotted_name(alias.asname.name if alias.asname else alias.name) for alias in one.names}
        start, end = script.span(statement)
        used = any(
            dotted_name(node) in local
            for kind in (cst.Name, cst.Attribute)
            for node in script.all(kind)
            if not start <= script.span(node)[0] < end
            and not any(a <= script.span(node)[0] and script.span(node)[1] <= b for a, b in gone)
        )
        if not used:
            draft.change(statement, "is not used any more.", draft.delete(statement))
