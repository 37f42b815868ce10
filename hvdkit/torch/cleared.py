"""Gradients that were cleared without the optimizer: by model.zero_grad(), `grad = None`, `grad.zero_()`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection

import torch

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.layout import Named
from hvdkit.torch.sharding.gradient import ShardedGradient


class Witnesses:
    """Two gradients that a pass has left for the next one to add to: they show cheaply that nothing was cleared."""

    def __init__(self) -> None:
        self._known: list[tuple[int, weakref.ref[torch.Tensor], int]] = []

    def note(self, named: Named, indices: Collection[int]) -> None:
        """Take two of these parameters' gradients as they are now."""
        pairs = ((index, named[index][1].grad) for index in itertools.islice(indices, 2))
        self._known = [(index, weakref.ref(one), one._version) for index, one in pairs if one is not None]

    def forget(self) -> None:
        """Take none."""
        self._known = []

    def show_untouched(self, named: Named, arrived: int) -> bool:
        """Is one of them, but for that of `arrived`, as it was?"""
        for index, held, version in self._known:
            known = held()
            if index != arrived and known is not None and known is named[index][1].grad and known._version == version:
                return True
        return False


def are_cleared(named: Named, indices: Collection[int], arrived: int) -> bool:
    """Have all these parameters no gradient, or zeros? That of `arrived` has been added up already: it is not read.

    False where it is the only one. Waits for a GPU where there are gradients.
    """
    others = [named[index][1].grad for index in indices if index != arrived]
    return bool(others) and all(_is_clear(gradient) for gradient in others)


def _is_clear(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    if isinstance(gradient, ShardedGradient):
        return False
    return not bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def reduced_already(name: str, passes: int) -> HorovodInternalError:
    """The error for a gradient that backward() has added to a reduced one."""
    return HorovodInternalError(
        f"backward() computed the gradient of {name} more than backward_passes_per_step={passes} times before "
        "optimizer.step(). With op=hvd.Sum, shard or hvd.BackupSteps() gradients are reduced once a step, and this one "
        "was added to a reduced one. If step() was skipped (GradScaler does so), call optimizer.zero_grad() before the "
        "next backward(). To add up gradients of several passes increase backward_passes_per_step, or call "
        "optimizer.step() earlier."
    )
