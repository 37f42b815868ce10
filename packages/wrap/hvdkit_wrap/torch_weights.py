"""Weight the loss on this rank, so that averages over ranks with different numbers of rows are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdkit.torch.autograd import NO_TASK, current_task
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import active, current
from hvdkit_wrap.shares import Share
from hvdkit_wrap.torch_losses import SUM, kinds_of, leaves_out

#: Key of an iterator over a loader in training -> the share of its last batch.
_shares: dict[int, Share] = {}
#: The number of backward passes so far.
passes = 0


def give(loader: int, share: Share) -> None:
    """Record this rank's share of the last batch of a loader."""
    _shares[loader] = share


def drop(loader: int) -> None:
    """Remove the share of a loader that has no more batches or is not iterated any more."""
    _shares.pop(loader, None)


def is_split() -> bool:
    """Do the ranks work on different rows now?"""
    return any(share.split for share in _shares.values())


def share_seen() -> Share | None:
    """Return this rank's share of a split batch that is being used; None if no batch is split."""
    return next((share for share in _shares.values() if share.split), None)


def weight_of(loss: Any) -> float:
    """Return the factor of the loss that makes its average over the ranks the loss of the whole batch."""
    if not is_split():
        return 1.0
    share = share_seen()
    assert share is not None
    kinds = kinds_of(loss, rows=len(share.rows), whole=share.whole)
    if SUM in kinds and len(kinds) > 1:
        raise refuse(
            "the loss adds a sum over the rows of a batch to a mean over them or to a penalty on weights; with rows "
            "split over ranks no single weight is correct for both terms",
            "Use the mean in place of the sum (reduction='mean'), and adapt the learning rate.",
        )
    weights = {share.sum_weight if kinds == {SUM} else share.mean_weight for share in _shares.values()}
    if len(weights) > 1:
        raise refuse(
            "this loss uses batches of several DataLoaders, and the ranks have unequal parts of these batches",
            "Use batch sizes that are multiples of the number of ranks, and drop_last=True.",
        )
    _tell(loss, kinds)
    return weights.pop()


def weight_seen(loss: Any) -> float | None:
    """Return the weight of the loss in its backward pass, or the one it would have; None if no batch is split."""
    known: float | None = getattr(loss, "_hvdkit_weight", None)
    return weight_of(loss) if known is None and is_split() else known


def _tell(loss: Any, kinds: set[str]) -> None:
    if current().report.shown:
        return
    if not kinds:
        current().report.say(
            "loss",
            "assumed to be a mean over the rows of a batch; any other loss gives other gradients than one process",
        )
    elif kinds == {SUM}:
        current().report.say("loss", "a sum over the rows of a batch; gradients are summed over the ranks")
    elif leaves_out(loss):
        current().report.say(
            "loss", "has class weights or ignored targets; gradients of ranks are weighted by rows only, not by these"
        )


def install(begin: Callable[[], None]) -> None:
    """Weight the losses of every backward pass. begin: called before each."""
    plain = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        global passes
        if active() and current_task() == NO_TASK:
            begin()
            passes += 1
            grad_tensors = _weigh(tensors, grad_tensors)
        plain(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _weigh(tensors: Any, gradients: Any) -> Any:
    losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    weights = [weight_of(one) for one in losses]
    for one, weight in zip(losses, weights, strict=True):
        if isinstance(one, torch.Tensor) and is_split():
            one._hvdkit_weight = weight  # type: ignore[attr-defined]  # backward() frees the graph that it follows from
    if all(weight == 1.0 for weight in weights):
        return gradients
    given = [gradients] * len(losses) if gradients is None or isinstance(gradients, torch.Tensor) else list(gradients)
    return [
        torch.full_like(loss, weight) if one is None and loss.numel() == 1 else one if one is None else one * weight
        for loss, one, weight in zip(losses, given, weights, strict=True)
    ]
