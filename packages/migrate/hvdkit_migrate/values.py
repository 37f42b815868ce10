"""The origin of values: assignments, parameters and results of functions, as far as a file shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import Scope

from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import Function, Script, last

#: Functions that pass on the elements of their argument.
_PASSING = {"enumerate", "tqdm", "iter", "islice", "track", "progress_bar", "list", "tuple", "trange", "filter"}


@dataclass(frozen=True)
class Bound:
    """A value that was assigned to a name. at: index of the element, if the value was unpacked."""

    value: cst.BaseExpression
    at: int | None
    node: cst.CSTNode


class Bindings:
    """The values of a script's names, and the functions of its own that it calls."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self._resolving: set[cst.CSTNode] = set()
        for function in script.all(cst.FunctionDef):
            self.functions[function.name.value].append(function)
        self.assigned: dict[tuple[Scope | None, str], list[Bound]] = defaultdict(list)
        for node in script.all(cst.Assign):
            for target in node.targets:
                self._bind(target.target, node.value, None, node)
        for one in script.all(cst.AnnAssign):
            if one.value is not None:
                self._bind(one.target, one.value, None, one)
        for named in script.all(cst.NamedExpr):
            self._bind(named.target, named.value, None, named)
        for item in script.all(cst.WithItem):
            if item.asname is not None:
                self._bind(item.asname.name, item.item, None, item)

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression, at: int | None, node: cst.CSTNode) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            values = value.elements if isinstance(value, (cst.Tuple, cst.List)) else ()
            for i, element in enumerate(target.elements):
                if len(values) == len(target.elements):
                    self._bind(element.value, values[i].value, None, node)
                else:
                    self._bind(element.value, value, i, node)
            return
        name = dotted_name(target)
        if name:
            self.assigned[self.script.names.home(target), name].append(Bound(value, at, node))

    def of(self, node: cst.BaseExpression) -> list[Bound]:
        """List the values assigned to a name in the scope that binds it, or to an attribute in the whole file."""
        name = dotted_name(node)
        return self.assigned.get((self.script.names.home(node), name), []) if name else []

    def defined(self, name: cst.Name) -> list[Function | cst.ClassDef]:
        """List the script's functions and classes that a name may mean; for a parameter, also those that calls pass."""
        found = self.script.names.definitions(name)
        if not self.script.names.is_parameter(name) or name in self._resolving:
            return found
        self._resolving.add(name)
        for value in self.given(name):
            found += self.defined(value) if isinstance(value, cst.Name) else []
        self._resolving.discard(name)
        return found

    def called(self, call: cst.Call) -> list[Function]:
        """List the functions of this script that a call may run."""
        name = last(call)
        if isinstance(call.func, cst.Name):
            defined = self.defined(call.func)
            makers = [one for one in self.functions.get("__init__", ()) if self._class_of(one) in defined]
            return [one for one in defined if isinstance(one, cst.FunctionDef)] + makers
        methods = [one for one in self.functions.get(name, ()) if self._class_of(one) is not None]
        if not methods or not isinstance(call.func, cst.Attribute):
            return []
        owner = call.func.value
        if dotted_name(owner) == "self":
            mine = next((one for one in self.script.above(call) if isinstance(one, cst.ClassDef)), None)
            return [one for one in methods if mine is None or self._class_of(one) is mine] or methods
        if call in self._resolving:
            return []  # the object of the call comes from the call itself
        self._resolving.add(call)
        classes = [made for one in self.origins(owner) if isinstance(one, cst.Call) for made in self.made_by(one)]
        self._resolving.discard(call)
        return [one for one in methods if self._class_of(one) in classes]

    def made_by(self, call: cst.Call) -> list[cst.ClassDef]:
        """List the script's classes of which a call may make an object."""
        if isinstance(call.func, cst.Name):
            return [one for one in self.defined(call.func) if isinstance(one, cst.ClassDef)]
        own = [] if self.script.name(call) else self.script.all(cst.ClassDef)
        return [one for one in own if one.name.value == last(call)]

    def calls_of(self, function: Function) -> list[cst.Call]:
        """List the calls of one of the script's functions, or of the class of which it is the __init__."""
        name = function.name.value
        owner = self._class_of(function)
        names = {name, owner.name.value} if name == "__init__" and owner is not None else {name}
        return [call for call in self.script.all(cst.Call) if last(call) in names and function in self.called(call)]

    def _class_of(self, function: Function) -> cst.ClassDef | None:
        above = next((a for a in self.script.above(function) if isinstance(a, (cst.ClassDef, cst.FunctionDef))), None)
        return above if isinstance(above, cst.ClassDef) else None

    def origins(self, node: cst.BaseExpression, depth: int = 8) -> list[cst.BaseExpression]:
        """List the expressions that may have made a value, as far back as visible; itself if none are."""
        return list(self._origins(node, None, depth))

    def _origins(self, node: cst.BaseExpression, at: int | None, depth: int) -> Iterator[cst.BaseExpression]:
        if not depth:
            return
        if at is not None and isinstance(node, cst.Tuple):
            if at < len(node.elements):
                yield from self._origins(node.elements[at].value, None, depth - 1)
            return
        if isinstance(node, cst.IfExp):
            yield from self._origins(node.body, at, depth - 1)
            yield from self._origins(node.orelse, at, depth - 1)
            return
        if isinstance(node, cst.Call):
            returned = [one for function in self.called(node) for one in self._returns(function)]
            if returned and not self.made_by(node):
                for value in returned:
                    yield from self._origins(value, at, depth - 1)
            else:
                yield node
            return
        if isinstance(node, cst.Subscript):
            picked = self._picked(node, depth)
            if picked is not None:
                yield from self._origins(picked, at, depth - 1)
                return
        bound = self.of(node)
        for one in bound:
            if one.value is not node:
                yield from self._origins(one.value, one.at if one.at is not None else at, depth - 1)
        given = [] if bound else self.given(node)
        for value in given:
            yield from self._origins(value, at, depth - 1)
        if not bound and not given:
            yield node

    def _picked(self, node: cst.Subscript, depth: int) -> cst.BaseExpression | None:
        """Find the value for a constant key in a dictionary literal."""
        index = node.slice[0].slice
        if not isinstance(index, cst.Index) or not isinstance(index.value, cst.SimpleString):
            return None
        for origin in self.origins(node.value, depth - 1):
            for element in origin.elements if isinstance(origin, cst.Dict) else ():
                key = element.key if isinstance(element, cst.DictElement) else None
                if isinstance(key, cst.SimpleString) and key.raw_value == index.value.raw_value:
                    return element.value
        return None

    def given(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """List the values that the script's calls pass for a name that is a parameter of the enclosing function."""
        function = self.script.function(node)
        names = _parameters(function) if function is not None else []
        if function is None or not isinstance(node, cst.Name) or node.value not in names:
            return []
        position = names.index(node.value) - bool(self._class_of(function) is not None)
        values = []
        for call in self.calls_of(function):
            plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
            named = [arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == node.value]
            values += named or ([plain[position].value] if 0 <= position < len(plain) else [])
        return values

    def _returns(self, function: Function) -> list[cst.BaseExpression]:
        return [
            one.value
            for one in self.script.inside(function, cst.Return)
            if one.value is not None and self.script.function(one) is function
        ]

    def iterated(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """List what a loop really iterates over, without enumerate, tqdm and the like, even if these are named."""
        if isinstance(node, cst.Call) and (last(node) in _PASSING or last(node) == "zip") and node.args:
            parts = node.args if last(node) == "zip" else node.args[:1]
            return [found for arg in parts for found in self.iterated(arg.value)]
        if isinstance(node, cst.Name):
            for one in self.of(node):
                if isinstance(one.value, cst.Call) and last(one.value) in _PASSING - {"list", "tuple"}:
                    return self.iterated(one.value)
        return [node]

    def reaching(self, seeds: list[cst.CSTNode]) -> set[Function]:
        """Find the functions that contain one of these nodes, and those that call such functions."""
        found: set[Function] = set()
        todo = [self.script.function(node) for node in seeds]
        while todo:
            function = todo.pop()
            if function is not None and function not in found:
                found.add(function)
                todo += [self.script.function(call) for call in self.calls_of(function)]
        return found


def _parameters(function: Function) -> list[str]:
    params = function.params
    return [one.name.value for one in (*params.posonly_params, *params.params, *params.kwonly_params)]
