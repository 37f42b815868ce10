"""Sharded parameters (DTensors): detection, and a view of this rank's shard as a parameter."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch

from hvdkit.errors import ParallelError
from hvdkit.torch.layout import Named

_MODULE = "torch.distributed.tensor"  # nothing is a DTensor before it is imported


class LocalDTensorView:
    """This rank's shard of a parameter: the local tensor, with the shard of the gradient as its `grad`."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def _local(self) -> torch.Tensor:
        local: torch.Tensor = self._parameter.detach().to_local()
        return local

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = [each._local if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient's shard on this rank; it shares memory with the parameter's gradient."""
        gradient = self._parameter.grad
        if gradient is None:
            return None
        if gradient.placements != self._parameter.placements:  # not yet summed over the tp ranks, or not sharded
            with torch.no_grad():
                gradient = self._parameter.grad = gradient.redistribute(placements=self._parameter.placements)
        local: torch.Tensor = gradient.detach().to_local()
        return local

    @grad.setter
    def grad(self, local: torch.Tensor | None) -> None:
        whole = self._parameter
        self._parameter.grad = (
            None
            if local is None
            else type(whole.data).from_local(
                local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        )


def _is_cut(parameter: torch.Tensor) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(parameter, module.DTensor)


def mark_parts(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Mark parameters that differ between ranks."""
    for parameter in parameters:
        parameter._hvdkit_part = True  # type: ignore[attr-defined]


def find_part(thing: Any) -> bool:
    """Return whether a module, a pipeline or an optimizer has parameters that differ between ranks or are sharded."""
    groups = getattr(thing, "param_groups", None)
    if groups is not None:
        parameters = [parameter for group in groups for parameter in group["params"]]
    elif callable(getattr(thing, "parameters", None)):
        parameters = list(thing.parameters())
    else:
        return False
    return any(_is_cut(each) or hasattr(each, "_hvdkit_part") for each in parameters)


def local_shards(named: Named) -> Named:
    """Return the same parameters, with a DTensor replaced by this rank's shard."""
    return [(name, LocalDTensorView(each) if _is_cut(each) else each) for name, each in named]  # type: ignore[misc]


def check_not_sharded(named: Named, ranks: Collection[int]) -> None:
    """Raise ParallelError for a parameter of which these ranks have different shards: no average would be right.

    ranks: of the process set; () for those of the world.
    """
    for name, parameter in named:
        if not _is_cut(parameter):
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        for number, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            along = set(torch.distributed.get_process_group_ranks(mesh.get_group(number)))
            if not placement.is_replicate() and len(along & set(ranks) if ranks else along) > 1:
                raise ParallelError(
                    f"DistributedOptimizer(): ranks {sorted(along)} have different parts of {name}, so their gradients "
                    "cannot be averaged. After shard(), which averages them itself, use the plain optimizer; after "
                    'tensor_parallel() pass process_set=mesh.group("dp").'
                )
