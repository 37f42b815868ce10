"""List the script's models in the order of their creation, and the names of their tensors."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_numbers = itertools.count()
_made: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def watch() -> None:
    """Record every module from now on, copies too; all ranks create the same modules in the same order."""
    init, setstate = nn.Module.__init__, nn.Module.__setstate__

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _note(self)

    def __setstate__(self: nn.Module, state: Any) -> None:
        setstate(self, state)  # type: ignore[no-untyped-call]
        _note(self)

    nn.Module.__init__ = __init__  # type: ignore[method-assign]
    nn.Module.__setstate__ = __setstate__  # type: ignore[method-assign]


def _note(module: nn.Module) -> None:
    if module not in _made:
        _made[module] = next(_numbers)


def roots() -> list[nn.Module]:
    """Return the modules that no other module contains, in the order of their creation."""
    alive = sorted(_made.items(), key=lambda pair: pair[1])
    inside = {id(child) for module, _ in alive for child in module.children()}
    return [module for module, _ in alive if id(module) not in inside]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names, without those that have no shape or no memory yet."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not torch.nn.parameter.is_lazy(tensor) and tensor.device.type != "meta":
            yield name, tensor


def names_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Return (name, parameter) of the optimizer's parameters, in model order; those of no model are numbered."""
    owned = [one for group in optimizer.param_groups for one in group["params"]]
    mine = {id(one) for one in owned}
    found: dict[int, tuple[str, Any]] = {}
    for at, module in enumerate(roots()):
        for name, parameter in module.named_parameters():
            if id(parameter) in mine and id(parameter) not in found:
                found[id(parameter)] = (f"{type(module).__name__}.{at}.{name}", parameter)
    for at, one in enumerate(owned):
        found.setdefault(id(one), (f"parameter.{at}", one))
    return list(found.values())


def trained_roots(optimizers: list[Any]) -> list[nn.Module]:
    """Return the models that have parameters of these optimizers."""
    mine = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    return [module for module in roots() if any(id(one) in mine for one in module.parameters())]
