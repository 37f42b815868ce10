"""Gradients that were cleared without the optimizer: by model.zero_grad() or `grad = None`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Set

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.layout import Named
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.uncompiled import uncompiled


class ClearedGradients:
    """Finds whether the gradients of a window were cleared.

    The gradient that arrives first in a pass is there already when it is examined, so the parameters that arrive first
    get a hook that runs before autograd adds to their gradient.

    named: of the optimizer; may grow.
    summed: indices of the parameters whose gradients are the same on all ranks; the owner changes it. Zeros of these
    count as no gradient; a rank's own zeros may be computed values, and other ranks would not call them cleared.
    hooks: handles of the parameters' hooks; the owner removes them.
    """

    def __init__(self, named: Named, summed: Set[int], hooks: list[RemovableHandle]) -> None:
        self._named, self._summed, self._hooks = named, summed, hooks
        #: Watched parameter -> whether the last backward pass found it without a gradient.
        self._before: dict[int, bool] = {}

    def watch(self, index: int) -> None:
        """Examine this parameter's gradient in later backward passes, before they add to it."""
        if index not in self._before:
            self._before[index] = False
            hook = uncompiled(_make_hook(weakref.ref(self), index))
            self._hooks.append(self._named[index][1].register_hook(hook))

    def examine(self, index: int) -> None:
        """Record whether the parameter has no gradient."""
        self._before[index] = self._is_cleared(index)

    def all_of(self, indices: Collection[int], arrived: int) -> bool:
        """Return whether all these parameters had no gradient before the backward pass that has begun.

        arrived: the parameter whose gradient is there already; if it is not watched, the others decide.
        Waits for a GPU if the gradients are the same on all ranks.
        """
        others = [index for index in indices if index != arrived]
        if arrived in indices and not self._before.get(arrived, bool(others)):
            return False
        return bool(indices) and all(self._is_cleared(index) for index in others)

    def _is_cleared(self, index: int) -> bool:
        gradient = self._named[index][1].grad
        return gradient is None or (index in self._summed and _are_zeros(gradient))


def _make_hook(held: weakref.ref[ClearedGradients], index: int) -> Callable[[torch.Tensor], None]:
    # Python's collector cannot see a parameter's hooks: objects that they hold would live as long as the process.
    def examine(gradient: torch.Tensor) -> None:
        cleared = held()
        if cleared is not None:
            cleared.examine(index)

    return examine


def _are_zeros(gradient: torch.Tensor) -> bool:
    if isinstance(gradient, ShardedGradient):
        return False
    return not bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def reduced_already(name: str, passes: int) -> HorovodInternalError:
    """Return the error for a gradient that backward() has added to a reduced one."""
    return HorovodInternalError(
        f"backward() computed the gradient of {name} more than backward_passes_per_step={passes} times before "
        "optimizer.step(). With op=hvd.Sum, shard or hvd.BackupSteps() gradients are reduced once a step, and this one "
        "was added to a reduced one. If step() was skipped (GradScaler does so), call optimizer.zero_grad() before the "
        "next backward(). To add up gradients of several passes increase backward_passes_per_step, or call "
        "optimizer.step() earlier."
    )
