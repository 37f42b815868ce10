"""Clipping of sharded gradients: norms are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

#: Sums a float32 tensor (n,) over the ranks; collective.
Sum = Callable[[Any], Any]


def clip_by_norms(gradients: Sequence[Any], tensors: Sequence[int], count: int, limit: float, add: Sum) -> list[Any]:
    """Clip by the norm of each tensor, as Keras does with clipnorm; collective.

    gradients: this rank's slices.
    tensors: the tensor of each slice, from 0 to count - 1; a negative number for none.
    count: number of tensors.
    limit: largest norm.
    add: sums over the ranks.
    """
    squares: list[Any] = [ops.zeros((), "float32") for _ in range(count)]
    for gradient, tensor in zip(gradients, tensors, strict=True):
        if tensor >= 0:
            squares[tensor] = squares[tensor] + _square(gradient)
    norms = ops.sqrt(add(ops.stack(squares)))
    scales = limit / ops.maximum(norms, limit)
    return [
        gradient * ops.cast(scales[tensor], gradient.dtype) if tensor >= 0 else gradient
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]


def clip_by_global_norm(gradients: Sequence[Any], limit: float, add: Sum) -> list[Any]:
    """Clip by the norm of all gradients together, as Keras does with global_clipnorm; collective."""
    square = sum((_square(gradient) for gradient in gradients), ops.zeros((), "float32"))
    norm = ops.sqrt(add(ops.reshape(square, (1,))))[0]
    scale = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # nan for an infinite norm
    return [gradient * ops.cast(scale, gradient.dtype) for gradient in gradients]


def _square(gradient: Any) -> Any:
    return ops.sum(ops.square(ops.cast(gradient, "float32")))
