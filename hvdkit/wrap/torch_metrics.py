"""loss.item(): what a script prints and decides by is the loss of the whole batch, the same on all ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.wrap import torch_weights
from hvdkit.wrap.session import active

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def watch() -> None:
    """Average over the ranks where the script itself calls item() of a loss of a split batch.

    Not within torch: printing and formatting a tensor may happen on some ranks only, in a logger that is silent here.
    """
    plain = torch.Tensor.item

    def item(self: Any) -> Any:
        value = plain(self)
        if self.grad_fn is None or not active() or self.dim():
            return value
        if sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return value
        weight = torch_weights.weight_seen(self)
        if weight is None:
            return value
        weighed = torch.tensor(value * weight, dtype=torch.float64)
        return plain(hvd.allreduce(weighed, name="wrap.loss"))

    torch.Tensor.item = item  # type: ignore[method-assign]
