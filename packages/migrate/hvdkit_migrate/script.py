"""A script for the rules: its syntax tree, the bytes of each node, and the meanings of its names."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, ParentNodeProvider, PositionProvider

from hvdkit_migrate.files import MigrateError
from hvdkit_migrate.names import Names, Unclear

Node = TypeVar("Node", bound=cst.CSTNode)
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Function = cst.FunctionDef


class Script:
    """A parsed script. It never changes; the rules make edits of its text.

    Raises MigrateError, with the line, for a text that is not Python 3.
    """

    def __init__(self, text: str, path: str) -> None:
        try:
            self.wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        except cst.ParserSyntaxError as error:
            raise MigrateError(
                f"{path}:{error.raw_line}: is not valid Python 3: {_first_line(error.message)}. "
                "Correct the line (2to3 converts Python 2), then run this command again."
            ) from None
        except RecursionError:
            raise MigrateError(f"{path}: is nested too deeply to be parsed. Split its longest expression.") from None
        self.path, self.text, self.data = path, text, text.encode()
        self.tree = self.wrapper.module
        self._bytes = self.wrapper.resolve(ByteSpanPositionProvider)
        self._places = self.wrapper.resolve(PositionProvider)
        self._parents = self.wrapper.resolve(ParentNodeProvider)
        self._nodes: dict[type[cst.CSTNode], list[cst.CSTNode]] = defaultdict(list)
        self.tree.visit(_Collector(self._nodes))
        self.names = Names(self.wrapper, self.all)
        self.words = set(re.findall(r"\w+", text))

    # Where nodes are -----------------------------------------------------------------------------------------------

    def all(self, kind: type[Node]) -> list[Node]:
        """List every node of exactly this class, in the order of the text."""
        return self._nodes[kind]  # type: ignore[return-value]

    def inside(self, node: cst.CSTNode, kind: type[Node]) -> list[Node]:
        """List the nodes of all(kind) inside `node`, itself included."""
        start, end = self.span(node)
        return [one for one in self.all(kind) if start <= self.span(one)[0] and self.span(one)[1] <= end]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return its first byte and the byte after its last: with its parentheses, without surrounding space."""
        place = self._bytes[node]
        left: Any = getattr(node, "lpar", ())
        right: Any = getattr(node, "rpar", ())
        if not isinstance(left, Sequence) or not left:
            return place.start, place.start + place.length
        last = self._bytes[right[-1]]
        return self._bytes[left[0]].start, last.start + last.length

    def line(self, node: cst.CSTNode) -> int:
        """Return its first line, from 1."""
        return int(self._places[node].start.line)

    def code(self, node: cst.CSTNode) -> str:
        """Return its text."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return its parent node."""
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield its parent, the parent of that, and so on."""
        now = self.parent(node)
        while now is not None:
            yield now
            now = self.parent(now)

    def function(self, node: cst.CSTNode) -> Function | None:
        """Return the enclosing function."""
        return next((one for one in self.above(node) if isinstance(one, cst.FunctionDef)), None)

    def statement(self, node: cst.CSTNode) -> Any:
        """Return the enclosing statement: a line, or a compound statement if the node is in its head."""
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
        return next(one for one in (node, *self.above(node)) if isinstance(one, kinds))

    def siblings(self, statement: cst.CSTNode) -> list[Any]:
        """List the statements of its block, itself included; only itself on a line like `if x: y`."""
        block = self.parent(statement)
        if isinstance(block, (cst.IndentedBlock, cst.Module)):
            return list(block.body)
        return [statement]

    def is_in_block(self, statement: cst.CSTNode) -> bool:
        """Is it on lines of its own, so that other lines can be put before and after it?"""
        return isinstance(self.parent(statement), (cst.IndentedBlock, cst.Module))

    def line_start(self, at: int) -> int:
        """Return the first byte of the line with byte `at`."""
        return self.data.rfind(b"\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        """Return the byte after the line with byte `at`, its line break included."""
        end = self.data.find(b"\n", at)
        return len(self.data) if end < 0 else end + 1

    def indent(self, statement: cst.CSTNode) -> str:
        """Return the white space before a statement's first line."""
        start = self.span(statement)[0]
        line = self.data[self.line_start(start) : start].decode()
        return line[: len(line) - len(line.lstrip())]

    @property
    def newline(self) -> str:
        """The line break of the file."""
        return "\r\n" if b"\r\n" in self.data else "\n"

    # What names are ------------------------------------------------------------------------------------------------

    def name(self, node: cst.CSTNode | None) -> str:
        """Return the import of a name, an attribute or a call's function: "torch.optim.SGD"; "" if not imported."""
        return self.names.imported(node)

    def assuming(self, unclear: Unclear, meaning: str) -> Script:
        """Return the same script, with one meaning for an unclear name."""
        other = copy.copy(self)
        other.words, other.names = set(self.words), self.names.assuming(unclear, meaning)
        return other

    def calls(self, *names: str) -> list[cst.Call]:
        """List calls of imported functions; a name that ends in a dot means all functions in that module."""
        return [call for call in self.all(cst.Call) if matches(self.name(call), names)]

    def imports_from(self, *packages: str) -> bool:
        """Does it import anything from these packages?"""
        return any(matches(name + ".", [p + "." for p in packages]) for name in self.names.modules)


class _Collector(cst.CSTVisitor):
    def __init__(self, nodes: dict[type[cst.CSTNode], list[cst.CSTNode]]) -> None:
        super().__init__()
        self.nodes = nodes

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.nodes[type(node)].append(node)
        return True


def matches(name: str, names: Any) -> bool:
    """Is it one of the names, or in a module among them (those end in a dot)?"""
    return bool(name) and any(name == one or (one.endswith(".") and name.startswith(one)) for one in names)


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.Arg | None:
    """Find an argument of a call by its keyword, or by its position; arguments in * and ** are not found."""
    for at, one in enumerate(call.args):
        if one.star:
            position = None if one.star == "*" else position
        elif (one.keyword is not None and one.keyword.value == keyword) or (
            one.keyword is None and position is not None and at == position
        ):
            return one
    return None


def last(node: cst.CSTNode) -> str:
    """Return the last component of a called name: "step" of `self.optimizer.step()`."""
    function = node.func if isinstance(node, cst.Call) else node
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].rstrip(".:") if message.strip() else "it cannot be parsed"
