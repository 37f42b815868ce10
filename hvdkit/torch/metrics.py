"""Averages over the samples of all ranks."""

from __future__ import annotations

import torch

from hvdkit.engine.reduce_op import Sum
from hvdkit.torch.reduce import allreduce


class Mean:
    """Average a value over all samples of all ranks, in float64. Ranks may have different numbers of samples, or none.

    Call `mean.update(loss.detach(), len(batch))` after each batch, then `mean.compute()` on every rank.

    name: of the allreduce, in errors and timelines; the same on every rank.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._total: torch.Tensor | float = 0.0
        self._count = 0

    def update(self, value: torch.Tensor | float, count: int = 1) -> None:
        """Add the average of `count` samples.

        value: one number, or a tensor of shape (); it stays on its device, so the call does not wait for a CUDA stream.
        """
        if isinstance(value, torch.Tensor):
            value = value.detach().to(torch.float64)
        if count:  # the average of no samples is nan and must not be added
            self._total = self._total + value * count
            self._count += count

    def compute(self) -> float:
        """The average over all ranks, the same on each; nan if no rank has a sample. A collective call."""
        mine = torch.tensor([float(self._total), float(self._count)], dtype=torch.float64)
        total, count = allreduce(mine, name=self._name, op=Sum).tolist()
        return total / count if count else float("nan")

    def reset(self) -> None:
        """Forget all samples."""
        self._total, self._count = 0.0, 0
