"""The meanings of names in a script at each use, by Python's scopes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import (
    BuiltinScope,
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

#: Other paths of names -> the path that the rules use.
_SAME = (
    ("tensorflow.python.keras.", "keras."),
    ("tensorflow.compat.v2.keras.", "keras."),
    ("tensorflow.keras.", "keras."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.utils.data.dataset.", "torch.utils.data."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
)

#: The scope that binds a name (None: this file does not bind it), and the name.
Key = tuple[Scope | None, str]


@dataclass(frozen=True)
class Imported:
    """A name that an import binds. full: its dotted name in the imported package. scope: the scope that binds it."""

    local: str
    full: str
    scope: Scope


@dataclass(frozen=True)
class Unclear:
    """A name with several meanings in one scope, or a name that only a star import can bind.

    key: its scope and name.
    use: its first use.
    candidates: the dotted name of each import that it may be; "" for a meaning that is not an import.
    lines: lines that bind it.
    is_star: do only star imports bind it?
    """

    key: Key
    use: cst.Name
    candidates: tuple[str, ...]
    lines: tuple[int, ...]
    is_star: bool = field(default=False)


class Names:
    """The names of a script, resolved by LibCST's scopes: own definitions and parameters hide imports."""

    def __init__(self, wrapper: MetadataWrapper, nodes: Callable[[type[Any]], list[Any]]) -> None:
        self._scopes = wrapper.resolve(ScopeProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._places = wrapper.resolve(PositionProvider)
        self._contexts = wrapper.resolve(ExpressionContextProvider)
        self._nodes = nodes
        self._assumed: dict[Key, str] = {}
        self._full: dict[tuple[cst.CSTNode, str], str] = {}
        self._stars: list[cst.ImportFrom] = []
        #: Every name that an import binds, in the order of the text.
        self.imports: list[Imported] = []
        #: The dotted names of everything imported: modules, and names from modules.
        self.modules: set[str] = set()
        for node in sorted([*nodes(cst.Import), *nodes(cst.ImportFrom)], key=lambda one: self._line(one)):
            self._read_import(node)

    def _read_import(self, node: cst.Import | cst.ImportFrom) -> None:
        module = dotted_name(node.module) if isinstance(node, cst.ImportFrom) else ""
        self.modules |= {module} - {""}
        if isinstance(node.names, cst.ImportStar):
            if isinstance(node, cst.ImportFrom) and not node.relative:
                self._stars.append(node)
            return
        if isinstance(node, cst.ImportFrom) and node.relative:
            return
        for alias in node.names:
            taken = dotted_name(alias.name)
            full = f"{module}.{taken}" if module else taken
            self.modules.add(full)
            local = dotted_name(alias.asname.name) if alias.asname else taken.partition(".")[0]
            if not module and not alias.asname:
                full = local
            self._full[node, local] = full
            scope = self._home(self._scope(node), local)
            if scope is not None:
                self.imports.append(Imported(local, _usual(full), scope))

    def imported(self, node: cst.CSTNode | None) -> str:
        """Return the dotted name as which a name, an attribute or a call's function was imported.

        Returns "" if it was not imported, or if that is unclear.
        """
        found = self.possible(node)
        return found[0] if len(found) == 1 else ""

    def possible(self, node: cst.CSTNode | None) -> list[str]:
        """List the dotted names as which it may have been imported; "" is a meaning that is not an import."""
        if isinstance(node, cst.Call):
            node = node.func
        first, dotted = _first(node), dotted_name(node)
        if first is None or not dotted:
            return [""]
        rest = dotted[len(first.value) :]
        key = self._key(first)
        found = [self._assumed[key]] if key in self._assumed else self._candidates(first)
        return list(dict.fromkeys(_usual(one + rest) if one else "" for one in found)) or [""]

    def definitions(self, name: cst.Name) -> list[cst.FunctionDef | cst.ClassDef]:
        """List the functions and classes of this file to which a name may refer at its use."""
        if self.imported(name):
            return []
        return [one for one in self._binders(name) if isinstance(one, (cst.FunctionDef, cst.ClassDef))]

    def is_parameter(self, name: cst.Name) -> bool:
        """May it be a parameter of the enclosing function, or of one further out?"""
        return any(isinstance(one, cst.Param) for one in self._binders(name))

    def is_builtin(self, node: cst.CSTNode) -> bool:
        """Is it Python's own name, for example `print` if nothing else has this name?"""
        return isinstance(node, cst.Name) and isinstance(self._key(node)[0], BuiltinScope)

    def home(self, node: cst.BaseExpression) -> Scope | None:
        """Return the scope that binds a name; None for other expressions."""
        return self._key(node)[0] if isinstance(node, cst.Name) else None

    def uses(self, node: cst.Import | cst.ImportFrom) -> list[cst.CSTNode]:
        """List the nodes that read the names which an import binds."""
        scope = self._scope(node)
        names = [local for one, local in self._full if one is node]
        bound = [each for name in names for each in scope[name] if getattr(each, "node", None) is node]
        return [access.node for each in bound for access in each.references]

    def local_name(self, full: str, at: cst.CSTNode) -> str:
        """Return the name by which an import of `full` can be used at a node; "" if it has none there."""
        scope = self._scope(at)
        for one in self.imports:
            if one.full == full and self._home(scope, one.local) is one.scope:
                assumed = self._assumed.get((one.scope, one.local))
                if [full] == (
                    self._meanings(self._bound(scope, one.local), one.local) if assumed is None else [assumed]
                ):
                    return one.local
        return ""

    def is_bound(self, name: str) -> bool:
        """Does anything in this file bind the name, except an import of a module with this name?"""
        return any(
            self._full.get((one, name)) != name
            for scope in {scope for scope in self._scopes.values() if scope is not None}
            for one in self._bound(scope, name)
        )

    def assuming(self, unclear: Unclear, meaning: str) -> Names:
        """Return the same names, with one meaning for an unclear name."""
        other = copy.copy(self)
        other._assumed = {**self._assumed, unclear.key: meaning}
        return other

    def unclear(self) -> list[Unclear]:
        """List the names that have several meanings, and those that only a star import can bind."""
        found: dict[Key, Unclear] = {}
        for name in self._nodes(cst.Name):
            key = self._key(name)
            if key in found or not self._is_use(name):
                continue
            candidates = tuple(self._candidates(name))
            if len(candidates) > 1:
                binders: list[Any] = self._binders(name) or [*self._stars]
                lines = sorted({self._line(one) for one in binders})
                found[key] = Unclear(key, name, candidates, tuple(lines), key[0] is None)
        return list(found.values())

    def _is_use(self, name: cst.Name) -> bool:
        """Is the name read here? Keywords of calls, attributes and names in imports have no scope."""
        defined = (cst.FunctionDef, cst.ClassDef, cst.Param)
        stored = self._contexts.get(name) is ExpressionContext.STORE
        return name in self._scopes and not stored and not isinstance(self._parents.get(name), defined)

    def _key(self, name: cst.Name) -> Key:
        return self._home(self._scope(name), name.value), name.value

    def _candidates(self, name: cst.Name) -> list[str]:
        binders = self._binders(name)
        if binders or self.is_builtin(name):
            return self._meanings(binders, name.value)
        stars = [f"{dotted_name(one.module)}.{name.value}" for one in self._stars if self._sees(name, one)]
        return [*stars, ""]

    def _sees(self, name: cst.Name, star: cst.ImportFrom) -> bool:
        at, scope = self._scope(star), self._scope(name)
        return at is scope.globals or at is scope

    def _meanings(self, binders: list[cst.CSTNode], local: str) -> list[str]:
        """List the import of each statement that binds a name, "" for another statement; None values are not usable."""
        found = [
            _usual(self._full[one, local]) if (one, local) in self._full else ""
            for one in binders
            if not self._is_none(one)
        ]
        return list(dict.fromkeys(found)) or [""]

    def _is_none(self, binder: cst.CSTNode) -> bool:
        """Is it the statement `wandb = None`, as in an `except ImportError`?"""
        assign = self._parents.get(self._parents.get(binder, binder))
        return isinstance(assign, cst.Assign) and dotted_name(assign.value) == "None"

    def _binders(self, name: cst.Name) -> list[cst.CSTNode]:
        return self._bound(self._scope(name), name.value)

    def _bound(self, scope: Scope, name: str) -> list[cst.CSTNode]:
        nodes: list[Any] = [getattr(one, "node", None) for one in scope[name]]
        return sorted((one for one in nodes if one is not None), key=self._line)

    def _home(self, scope: Scope, name: str) -> Scope | None:
        return next((one.scope for one in scope[name]), None)

    def _scope(self, node: cst.CSTNode) -> Scope:
        """Return the scope of a node; a node without a scope has that of the enclosing node."""
        for one in (node, *self._above(node)):
            scope = self._scopes.get(one)
            if scope is not None:
                return scope
        return next(scope.globals for scope in self._scopes.values() if scope is not None)

    def _above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def _line(self, node: cst.CSTNode) -> int:
        return int(self._places[node].start.line)


def dotted_name(node: cst.CSTNode | None) -> str:
    """Return "a.b.c" for a name or a chain of attributes; "" for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted_name(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def _first(node: cst.CSTNode | None) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def _usual(full: str) -> str:
    for one, other in _SAME:
        if (full + ".").startswith(one):
            full = (other + (full + ".")[len(one) :]).rstrip(".")
    return full
