"""Gradients that were cleared without the optimizer: by model.zero_grad() or `grad = None`."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.layout import Named
from hvdkit.torch.sharding.gradient import ShardedGradient


def are_cleared(named: Named, indices: Collection[int], arrived: int, *, reduced: bool) -> bool:
    """Return whether all these parameters have no gradient, without reading that of `arrived`, which is already there.

    reduced: whether the gradients are the same on all ranks. Zeros then count as no gradient; a rank's own zeros may be
    computed values, and other ranks would not call them cleared.
    Returns False if `arrived` is the only parameter. Waits for a GPU if the gradients are reduced.
    """
    others = [named[index][1].grad for index in indices if index != arrived]
    return bool(others) and all(one is None or (reduced and _are_zeros(one)) for one in others)


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
