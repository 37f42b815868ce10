"""A model to train, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """A model to train.

    make: builds it. batch: makes inputs and targets of one step. loss: of the model's output and the targets.
    bfloat16: is it computed in bfloat16 (autocast)? Parameters and gradients are float32 in any case.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    bfloat16: bool = False
