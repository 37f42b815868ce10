"""A notice, logged once, about the overlap that torch.compile prevents."""

from __future__ import annotations

import sys

from hvdkit.engine.planned.reducer import Statistics
from hvdkit.log import logger
from hvdkit.torch.layout import Named

_AFTER = 5  # number of reductions; their exposed time is averaged


class CompiledNotice:
    """Logs once, on rank 0, that gradients of a compiled module all arrive at the end of its backward."""

    def __init__(self) -> None:
        self._logged = False

    def after_reduction(self, statistics: Statistics, named: Named, rank: int) -> None:
        """Log the notice if the module is compiled. named: (name, parameter) pairs."""
        if self._logged or statistics.generations < _AFTER or not statistics.exposed_s:
            return  # the times of a GPU are known later
        self._logged = True
        if rank == 0 and (any("_orig_mod." in name for name, _ in named) or _backward_compiled()):
            logger.warning(
                "torch.compile: a compiled model delivers all its gradients at the end of backward(), so their "
                "allreduce cannot overlap with backward(). Each step waits %.1f ms for communication. The results are "
                "correct. To get the overlap back, compile each block of the model (block.compile()) instead of the "
                "whole model.",
                1000 * statistics.exposed_s / statistics.generations,
            )


def _backward_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return bool(utils is not None and utils.counters["aot_autograd"].get("ok"))
