"""A warning about a second epoch in the order of the first: a training loop without set_epoch()."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdkit.log import logger

_steps: int | None = None  # of all optimizers; None until the first call
_warned = False


def count_steps() -> int:
    """Return the number of steps of all torch optimizers of this process since the first call."""
    global _steps
    if _steps is None:
        _steps = 0
        register_optimizer_step_post_hook(_count)
    return _steps


def warn_of_repeated_order(sampler: str, *, first: bool) -> None:
    """Log the warning once. sampler: the name of its class. first: whether this is rank 0."""
    global _warned
    if first and not _warned:
        logger.warning(
            "%s: this epoch has the order of samples of the epoch before. Call sampler.set_epoch(epoch) before each "
            "epoch, or pass shuffle=False.",
            sampler,
        )
    _warned = True


def _count(optimizer: Any, args: Any, kwargs: Any) -> None:
    global _steps
    assert _steps is not None
    _steps += 1
