"""Make loss.item() return the loss of the whole batch, which is the same on all ranks."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.log import logger
from hvdkit_wrap import torch_weights
from hvdkit_wrap.row_sums import find_product
from hvdkit_wrap.session import active, current

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

_warned = False


def watch() -> None:
    """Average over the ranks when the script itself calls item() of a loss of a split batch.

    Calls from torch are unchanged: a tensor may be printed or formatted on some ranks only, because loggers are silent
    on the others.
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
        _warn_of_row_sum(sys._getframe(1))
        weighed = torch.tensor(value * weight, dtype=torch.float64)
        return plain(hvd.allreduce(weighed, name="wrap.loss"))

    torch.Tensor.item = item  # type: ignore[method-assign]


def _warn_of_row_sum(frame: FrameType) -> None:
    """Warn once of a sum over an epoch that multiplies by this rank's rows, where one process would use all rows."""
    global _warned
    share = torch_weights.share_seen()
    if _warned or not current().first or share is None:
        return
    line = find_product(frame, len(share.rows))
    if line:
        _warned = True
        logger.warning(
            "hvdrun --wrap: %s:%d multiplies loss.item(), the loss of all %d rows of a batch, by %d, the rows of rank "
            "0. The sum of such products divided by the length of the dataset is about 1/%d of one process's. Sum "
            "loss.item() and divide by the number of batches, or divide by the sum of the same counts.",
            os.path.basename(frame.f_code.co_filename),
            line,
            share.whole,
            len(share.rows),
            current().size,
        )
