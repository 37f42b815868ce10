"""The findings of the rules about a script so far, and the functions by which rules make edits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import libcst as cst

from hvdkit_migrate.findings import Edit, Finding, Kind
from hvdkit_migrate.script import Script
from hvdkit_migrate.values import Bindings

_SILENCED = re.compile(rb"#.*\bhvdkit: *ok\b")


class Draft:
    """Collects findings; hvd: the name under which hvdkit's module is, or will be, imported."""

    def __init__(self, script: Script, hvd: str) -> None:
        self.script, self.hvd = script, hvd
        self._found: list[tuple[Finding, int | None]] = []
        self._deleted: set[cst.CSTNode] = set()
        #: Lines of imports that the changes need in addition to hvdkit's.
        self.extra_imports: list[str] = []
        self._extra_names: dict[str, str] = {}
        #: Is the script written for many ranks already, including its learning rates?
        self.is_distributed = False
        #: The byte from which code at the top of the script runs after hvd.init().
        self.ready = 0

    @cached_property
    def bindings(self) -> Bindings:
        """The values of the script's names."""
        return Bindings(self.script)

    # Findings ------------------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """The findings to report: `# hvdkit: ok` removes doubts about a statement, or if there are none its changes."""
        doubted = {at for one, at in self._found if one.kind == "break" and at is not None}
        return [one for one, at in self._found if at is None or (one.kind == "change" and at in doubted)]

    def change(self, node: cst.CSTNode, what: str, *edits: Edit) -> None:
        """Add a change that the edits make; not if earlier changes have replaced all its text."""
        gone = [(one.start, one.end) for found, _ in self._found for one in found.edits if one.end > one.start]
        mine = [(one.start, one.end) for one in edits if one.end > one.start]
        if mine and all(any(a <= start and end <= b for a, b in gone) for start, end in mine):
            return
        self._add("change", node, what, "", edits)

    def breaks(self, node: cst.CSTNode, what: str, write: str) -> None:
        """Add a problem to fix by hand, because of which the script fails or trains wrongly."""
        self._add("break", node, what, write)

    def better(self, node: cst.CSTNode, what: str, write: str) -> None:
        """Add advice."""
        self._add("better", node, what, write)

    def _add(self, kind: Kind, node: cst.CSTNode, what: str, write: str, edits: Sequence[Edit] = ()) -> None:
        line = 1 if node is self.script.tree else self.script.line(node)
        finding = Finding(kind, line, what, write, tuple(edits))
        at = self.script.span(self.script.statement(node))[0] if self.is_silenced(node) else None
        if (finding, at) not in self._found:
            self._found.append((finding, at))

    def is_silenced(self, node: cst.CSTNode) -> bool:
        """Does its line, or the last line of its statement, have a comment `# hvdkit: ok`?"""
        if node is self.script.tree:
            return False
        start, end = self.script.span(node)[0], self.script.span(node)[0]
        statement = self.script.statement(node)
        if isinstance(statement, cst.SimpleStatementLine):
            end = self.script.span(statement)[1] - 1
        lines = (self.script.data[self.script.line_start(at) : self.script.line_end(at)] for at in (start, end))
        return any(_SILENCED.search(line) is not None for line in lines)

    def fresh(self, name: str) -> str:
        """Make a name that the script does not have."""
        words = self.script.words
        made = next(one for one in (name, *(f"{name}_{i}" for i in range(2, 99))) if one not in words)
        words.add(made)
        return made

    def need_import(self, module: str, at: cst.CSTNode) -> str:
        """Return the name of a module at a node; without a name there, the module is imported at the top."""
        found = self.script.names.local_name(module, at)
        if found:
            return found
        if module not in self._extra_names:
            taken = self.script.names.is_bound(module)
            self._extra_names[module] = self.fresh(module) if taken else module
            self.extra_imports.append(
                f"import {module} as {self._extra_names[module]}" if taken else f"import {module}"
            )
        return self._extra_names[module]

    # Edits ---------------------------------------------------------------------------------------------------------

    def replace(self, node: cst.CSTNode, text: str) -> Edit:
        """Replace a node by other text."""
        return Edit(*self.script.span(node), text)

    def insert(self, at: int, text: str) -> Edit:
        """Insert text before byte `at`."""
        return Edit(at, at, text)

    def around(self, node: cst.CSTNode, before: str, after: str) -> tuple[Edit, Edit]:
        """Insert text on both sides of a node."""
        start, end = self.script.span(node)
        return Edit(start, start, before), Edit(end, end, after)

    def times(self, node: cst.BaseExpression, factor: str) -> tuple[Edit, ...]:
        """Multiply a number by a factor on its right, with parentheses if it needs them."""
        simple = (cst.Name, cst.Attribute, cst.Integer, cst.Float, cst.Call, cst.Subscript)
        if isinstance(node, simple) or node.lpar:
            end = self.script.span(node)[1]
            return (Edit(end, end, f" * {factor}"),)
        return self.around(node, "(", f") * {factor}")

    def add_argument(self, call: cst.Call, text: str) -> Edit:
        """Add an argument after the others."""
        if call.args:
            at = self.script.span(call.args[-1])[1]
            return Edit(at, at, f", {text}")
        at = self.script.span(call)[1] - 1
        return Edit(at, at, text)

    def remove_arguments(self, call: cst.Call, arguments: Sequence[cst.Arg]) -> tuple[Edit, ...]:
        """Remove arguments with their commas."""
        edits, gone = [], set(arguments)
        args, kept = list(call.args), None
        at = 0
        while at < len(args):
            if args[at] not in gone:
                kept, at = args[at], at + 1
                continue
            after = next((i for i in range(at, len(args)) if args[i] not in gone), len(args))
            start = self.script.span(args[at])[0]
            end = self.script.span(args[after - 1])[1]
            if after < len(args):
                edits.append(Edit(start, self.script.span(args[after])[0], ""))
            else:
                edits.append(Edit(self.script.span(kept)[1] if kept is not None else start, end, ""))
            at = after
        return tuple(edits)

    def before_element(self, node: cst.CSTNode, text: str) -> Edit:
        """Insert text on a line of its own before the first element of a list, with its indentation."""
        at = self.script.span(node)[0]
        line = self.script.data[self.script.line_start(at) : at].decode()
        return Edit(at, at, text + self.script.newline + line[: len(line) - len(line.lstrip())])

    def before(self, statement: cst.CSTNode, *lines: str) -> Edit:
        """Insert lines before a statement, with its indentation."""
        start = self.script.span(statement)[0]
        at = self.script.line_start(start)
        return Edit(at, at, self._lines(statement, lines), 1)

    def after(self, statement: cst.CSTNode, *lines: str) -> Edit:
        """Insert lines after a statement, with its indentation."""
        end = self.script.span(statement)[1]
        end = len(self.script.data[:end].rstrip())
        at = self.script.line_end(max(end - 1, 0))
        text = self._lines(statement, lines)
        if at and self.script.data[at - 1 : at] != b"\n":
            text = self.script.newline + text.rstrip("\r\n")
        return Edit(at, at, text, 0)

    def _lines(self, statement: cst.CSTNode, lines: Sequence[str]) -> str:
        indent, unit = self.script.indent(statement), self._unit(statement)
        lines = [unit + line[4:] if line.startswith("    ") else line for line in lines]
        return "".join((indent + line if line else "") + self.script.newline for line in lines)

    def _unit(self, statement: cst.CSTNode) -> str:
        return "\t" if self.script.indent(statement).startswith("\t") else self.script.tree.default_indent

    def delete(self, statement: cst.CSTNode) -> Edit:
        """Delete a statement with its line.

        An `if` that contains nothing else is deleted with it; a block that would be empty gets `pass`.
        """
        start, end = self.script.span(statement)
        self._deleted.add(statement)
        if not self.script.is_in_block(statement):
            return Edit(start, end, "pass")
        if all(one in self._deleted for one in self.script.siblings(statement)):
            block = self.script.parent(statement)
            above = self.script.parent(block) if block is not None else None
            alone = len(self.script.siblings(statement)) == 1
            if isinstance(above, cst.If) and above.orelse is None and alone and self.script.is_in_block(above):
                return self.delete(above)
            return Edit(start, end, "pass")
        return Edit(self.script.line_start(start), self.script.line_end(max(end - 1, 0)), "")

    def guard(self, statements: Sequence[cst.CSTNode], condition: str) -> tuple[Edit, ...]:
        """Put consecutive statements, each on lines of its own, under an `if`."""
        first, final = statements[0], statements[-1]
        begin = self.script.line_start(self.script.span(first)[0])
        end = self.script.span(final)[1]
        unit = self._unit(first)
        edits = [Edit(begin, begin, f"{self.script.indent(first)}if {condition}:{self.script.newline}")]
        strings = [
            self.script.span(one)
            for kind in (cst.SimpleString, cst.FormattedString)
            for one in self.script.all(kind)
            if begin <= self.script.span(one)[0] < end
        ]
        at = begin
        while at < end:
            after = self.script.line_end(at)
            if self.script.data[at:after].strip() and not any(start < at < stop for start, stop in strings):
                edits.append(Edit(at, at, unit))
            at = after
        return tuple(edits)
