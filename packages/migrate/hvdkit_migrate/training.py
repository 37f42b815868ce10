"""The training of a PyTorch script: its loaders, optimizers and training loops."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import libcst as cst

from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import Function, Script, argument, last
from hvdkit_migrate.values import Bindings

_EVALUATION = re.compile(r"(^|[_.\W])(test|val|valid|validation|eval|evaluation|dev)", re.IGNORECASE)

_LOADERS = ("torch.utils.data.DataLoader", "torch_geometric.loader.DataLoader", "torch_geometric.data.DataLoader")


@dataclass
class Loader:
    """A DataLoader.

    call: its constructor.
    use: what the loops over it do.
    loops: these loops, with the expression that each iterates over.
    sharded: does the migrated script shard it?
    shuffled: does it then shuffle the shards?
    """

    call: cst.Call
    use: Literal["train", "evaluate", "unknown"] = "unknown"
    loops: list[tuple[cst.For, cst.BaseExpression]] = field(default_factory=list)
    sharded: bool = False
    shuffled: bool = False

    @property
    def dataset(self) -> cst.BaseExpression | None:
        """The expression of its dataset."""
        found = argument(self.call, "dataset", 0)
        return found.value if found is not None else None


@dataclass
class Optimizer:
    """An optimizer.

    call: its constructor.
    target: the name to which it is assigned, "" if none.
    models: the models whose parameters it has.
    own_rates: do its parameter groups set learning rates?
    from_torch: is it a class of torch.optim?
    """

    call: cst.Call
    target: str
    models: list[str]
    own_rates: bool
    from_torch: bool


class Training:
    """The loaders, optimizers and training loops of a script."""

    def __init__(self, script: Script, bindings: Bindings) -> None:
        self.script, self.bindings = script, bindings
        self.backwards = [call for call in script.all(cst.Call) if last(call) == "backward" and _is_method(call)]
        self.functions: set[Function] = bindings.reaching(list(self.backwards))

    def trains(self, node: cst.CSTNode) -> bool:
        """Does this node, or a function that it calls, contain a backward pass?"""
        return any(
            call in self.backwards or any(one in self.functions for one in self.bindings.called(call))
            for call in self.script.inside(node, cst.Call)
        )

    @cached_property
    def loaders(self) -> list[Loader]:
        """Every DataLoader that the script makes."""
        found = {call: Loader(call) for call in self.script.calls(*_LOADERS)}
        for loop in self.script.all(cst.For):
            for iterated in self.bindings.iterated(loop.iter):
                for origin in self.bindings.origins(iterated):
                    if isinstance(origin, cst.Call) and origin in found:
                        found[origin].loops.append((loop, iterated))
        for loader in found.values():
            loader.use = self._use(loader)
        return list(found.values())

    def _use(self, loader: Loader) -> Literal["train", "evaluate", "unknown"]:
        if any(self.trains(loop) for loop, _ in loader.loops):
            return "train"
        if loader.loops and not any(self._yields(loop) for loop, _ in loader.loops):
            return "evaluate"
        shuffle = argument(loader.call, "shuffle", 2)
        if shuffle is not None and self.script.code(shuffle.value) == "True":
            return "unknown"
        above = self.script.statement(loader.call)
        name = self.script.code(above).partition("=")[0] if isinstance(above, cst.SimpleStatementLine) else ""
        given = self.script.code(loader.dataset) if loader.dataset is not None else ""
        return "evaluate" if _EVALUATION.search(name) or _EVALUATION.search(given) else "unknown"

    def _yields(self, loop: cst.For) -> bool:
        return bool(self.script.inside(loop, cst.Yield))

    def loader_of(self, node: cst.BaseExpression) -> list[Loader]:
        """List the loaders that an expression may mean; empty if one of them is not of this script."""
        calls = {loader.call: loader for loader in self.loaders}
        origins = self.bindings.origins(node)
        found = [calls[one] for one in origins if isinstance(one, cst.Call) and one in calls]
        return found if len(found) == len(origins) else []

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that the script makes: torch's, and objects that seem to be optimizers and are stepped."""
        stepped = {
            dotted_name(call.func.value)
            for call in self.script.all(cst.Call)
            if isinstance(call.func, cst.Attribute) and last(call) in ("step", "zero_grad")
        }
        found = []
        for call in self.script.all(cst.Call):
            name = self.script.name(call)
            own = is_torch_optimizer(name)
            target = self._target(call)
            parameters = any(
                last(one) == "parameters" for arg in call.args for one in self.script.inside(arg, cst.Call)
            )
            other = parameters and target in stepped and target and not name.startswith("torch.optim.")
            chosen = last(call.func) == "getattr" and "torch.optim" in [self.script.name(a.value) for a in _args(call)]
            if (own or other or chosen) and not isinstance(self.script.parent(call), cst.Decorator):
                models, rates = self._trained(call)
                found.append(Optimizer(call, target, models, rates, own))
        return found

    def _target(self, call: cst.Call) -> str:
        for (_, name), bounds in self.bindings.assigned.items():
            for bound in bounds:
                value = bound.value
                while isinstance(value, cst.IfExp):
                    value = value.body if call in self.script.inside(value.body, cst.Call) else value.orelse
                if value is call:
                    return name
        return ""

    def _made_of(self, value: cst.BaseExpression) -> list[cst.BaseExpression]:
        """List the expressions that may have made a list of parameters, or of groups of them."""
        found = list(self.bindings.origins(value))
        for one in found:
            for name in self.script.inside(one, cst.Name):
                if not isinstance(self.script.parent(name), (cst.Attribute, cst.Arg)) and len(found) < 20:
                    found += [origin for origin in self.bindings.origins(name) if origin not in (name, *found)]
        return found

    def _trained(self, call: cst.Call) -> tuple[list[str], bool]:
        given = argument(call, "params", 0)
        if given is None:
            return [], False
        models: list[str] = []
        rates = False
        for origin in self._made_of(given.value):
            rates |= any(
                self.script.code(one) in ("'lr'", '"lr"') for one in self.script.inside(origin, cst.SimpleString)
            )
            if self.script.function(origin) is self.script.function(call):
                models += [
                    self.script.code(one.func.value)
                    for one in self.script.inside(origin, cst.Call)
                    if last(one) in ("parameters", "named_parameters") and isinstance(one.func, cst.Attribute)
                    if dotted_name(one.func.value)
                ]
        return list(dict.fromkeys(models)), rates


def is_torch_optimizer(name: str) -> bool:
    """Is this the name of an optimizer class of torch.optim?"""
    module, _, own = name.rpartition(".")
    return module.startswith("torch.optim") and own[:1].isupper() and not re.search("lr_scheduler|swa_utils", module)


def _args(call: cst.Call) -> list[cst.Arg]:
    return list(call.func.args) if isinstance(call.func, cst.Call) else []


def _is_method(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute)
