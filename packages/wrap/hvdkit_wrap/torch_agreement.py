"""After an epoch, synchronize random states and buffers, and check that parameters are equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.errors import WrapError
from hvdkit_wrap import randomness, torch_begin, torch_models

_trained = False


def synchronize_ranks() -> None:
    """Synchronize the ranks at the end of an epoch of training; collective."""
    global _trained
    _trained = True
    states: dict[str, Any] = hvd.broadcast_object(randomness.read_states() if hvd.rank() == 0 else {})
    if hvd.rank() != 0:
        randomness.set_states(states)
    _check()
    before_evaluation()


def before_evaluation() -> None:
    """Broadcast rank 0's buffers, so that all ranks compute the same; collective if a batch was trained on before."""
    global _trained
    if not _trained or not hvd.is_initialized():
        return
    _trained = False
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for at, root in enumerate(torch_models.trained_roots(torch_begin.optimizers())):
        for name, buffer in root.named_buffers():
            tensors.setdefault(id(buffer), (f"{at}.{name}", buffer))
    if tensors:
        hvd.broadcast_parameters(list(tensors.values()))


def trained() -> None:
    """Record that a batch was trained on."""
    global _trained
    _trained = True


def _check() -> None:
    """Raise WrapError if parameters differ between ranks: then the script does not do the same on all ranks."""
    mine = [
        float(sum(one.detach().double().sum() for group in optimizer.param_groups for one in group["params"]))
        for optimizer in torch_begin.optimizers()
    ]
    told = hvd.allgather_object(mine, name="wrap.check")
    for rank, theirs in enumerate(told):
        if len(theirs) != len(mine) or any(not _close(one, two) for one, two in zip(mine, theirs, strict=False)):
            raise WrapError(
                f"hvdrun --wrap: at the end of an epoch, rank {rank} and rank {hvd.rank()} have different parameters. "
                f"The script changes gradients or parameters by a value that differs between ranks (noise, a number "
                f"computed from the rows of one rank, a skipped step). `hvdkit migrate` shows how to write the script "
                f"for several ranks."
            )


def _close(one: float, two: float) -> bool:
    return one == two or (one != one and two != two) or abs(one - two) <= 1e-5 * max(abs(one), abs(two), 1e-3)
