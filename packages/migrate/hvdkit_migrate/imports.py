"""Imports of a migrated script, and hvd.init(): adds them at its beginning, and removes unused imports."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import Script, matches


def import_place(script: Script, before: int) -> cst.CSTNode | None:
    """Find the last import at the top of a script, before its first function and before byte `before`."""
    found = None
    for statement in script.tree.body:
        if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) or script.span(statement)[0] >= before:
            break
        if isinstance(statement, cst.If) and _is_guard(statement):
            break
        if _is_import(statement) or (isinstance(statement, cst.Try) and _is_import(statement.body.body[0])):
            found = statement
    return found


def guard_of(script: Script) -> cst.If | None:
    """Find the statement `if __name__ == "__main__":`."""
    guards = (one for one in script.tree.body if isinstance(one, cst.If) and _is_guard(one))
    return next(guards, None)


def _is_guard(statement: cst.If) -> bool:
    test = statement.test
    return isinstance(test, cst.Comparison) and dotted_name(test.left) == "__name__"


def _is_import(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in statement.body)


def begin(draft: Draft, module: str, *, after_init: list[str]) -> None:
    """Add the import and hvd.init(), before the first use by other changes or at the beginning of the script.

    after_init: lines to add directly after hvd.init().
    """
    script, hvd, extra_imports = draft.script, draft.hvd, draft.extra_imports
    edits = [edit for finding in draft.findings for edit in finding.edits]
    users = [edit.start for edit in edits if f"{hvd}." in edit.text]
    if not users and not after_init:
        if extra_imports and edits:
            place = import_place(script, len(script.data))
            draft.change(script.tree, "is imported for the changes.", _after_import(draft, place, extra_imports))
        return
    guard = guard_of(script)
    imports = [*extra_imports, f"import {module} as {hvd}"]
    top_level = [at for at in users if _is_top_level(script, at, guard)]
    place = import_place(script, min(top_level, default=len(script.data)))
    in_guard = guard is not None and not top_level and isinstance(guard.body, cst.IndentedBlock)
    is_entry = guard is not None or bool(top_level) or _runs(script)
    lines = [] if in_guard or not is_entry else [f"{hvd}.init()", *after_init]
    text = ["", *imports] if lines else imports
    node = place or script.tree
    draft.change(
        node, f"{module} is imported as {hvd}.", _after_import(draft, place, [*text, *([""] if lines else []), *lines])
    )
    if in_guard:
        assert guard is not None
        assert isinstance(guard.body, cst.IndentedBlock)
        first = guard.body.body[0]
        draft.change(first, "initializes hvdkit.", draft.before(first, f"{hvd}.init()", *after_init))


def ready_from(script: Script) -> int:
    """Return the byte from which code at the top of the script runs after hvd.init()."""
    place = import_place(script, len(script.data))
    return 0 if place is None else script.span(place)[1]


def _after_import(draft: Draft, place: cst.CSTNode | None, lines: list[str]) -> Edit:
    if place is not None:
        return draft.after(place, *lines)
    body = draft.script.tree.body
    return draft.before(body[0], *lines, "") if body else Edit(0, 0, "\n".join([*lines, ""]))


def _is_top_level(script: Script, at: int, guard: cst.If | None) -> bool:
    """Is byte `at` in code that runs when the file is imported?"""
    for statement in script.tree.body:
        start, end = script.span(statement)
        if script.line_start(start) <= at <= script.line_end(max(end - 1, 0)) and start <= max(at, start) < end + 1:
            return statement is not guard and not isinstance(statement, (cst.FunctionDef, cst.ClassDef))
    return True


def _runs(script: Script) -> bool:
    """Does the file run statements when it is started, other than definitions?"""
    for statement in script.tree.body:
        if isinstance(statement, (cst.For, cst.While, cst.With)):
            return True
        if isinstance(statement, cst.SimpleStatementLine) and any(
            isinstance(one, cst.Expr) and isinstance(one.value, cst.Call) for one in statement.body
        ):
            return True
    return False


def drop_unused(draft: Draft, modules: tuple[str, ...]) -> None:
    """Delete import lines whose names are all from `modules` and are used only in code that the changes remove."""
    script = draft.script
    removed = [(edit.start, edit.end) for finding in draft.findings for edit in finding.edits if edit.end > edit.start]
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
        spans = [script.span(use) for use in script.names.uses(one)]
        used = any(not any(a <= start and end <= b for a, b in removed) for start, end in spans)
        if not used:
            draft.change(statement, "is no longer used.", draft.delete(statement))
