"""Reduction of the loss that a closure returns, so that the optimizers of all ranks decide by the same loss."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.reduce_op import ReduceOp
from hvdkit.torch.reduce import allreduce


def reduce_loss(
    loss: Any, op: ReduceOp, weight: float, device: torch.device, name: str, process_set: ProcessSet
) -> Any:
    """Average (or sum) over the ranks the losses that their closures have returned; collective.

    loss: a number, a tensor of one element, which keeps its graph, or None. None counts as 0, as the rank's gradients
    do, and the rank gets the loss of the others; it gets None if all ranks have None. Any other value is returned
    unchanged.
    op: of the gradients.
    weight: of the gradients.
    device: where the losses are reduced; its type is the same on all ranks.
    name: of the allreduce.
    process_set: the ranks that take part.
    """
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point()
    is_number = isinstance(loss, numbers.Real)
    pair = torch.zeros(2, dtype=torch.float64, device=device)  # the loss, and whether this rank has a loss
    if is_tensor or is_number:
        value = loss.detach().reshape(()).to(pair) if is_tensor else float(loss)
        pair[0], pair[1] = value * weight if weight else 0.0, 1.0
    pair = allreduce(pair, op=op, name=name, process_set=process_set)
    if is_tensor:
        return _WithValue.apply(loss, pair[0])  # type: ignore[no-untyped-call]
    if is_number or loss is None:
        return float(pair[0]) if pair[1] else None
    return loss


class _WithValue(torch.autograd.Function):
    """The identity for gradients; forward returns another value for the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.to(tensor).reshape(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
