"""ShardedGradient: the gradient of a parameter of which this rank has only a shard, with its possible operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

_aten = torch.ops.aten
#: In-place operations that work on each element independently.
_IN_PLACE = frozenset(
    (
        _aten.mul_.Tensor,
        _aten.mul_.Scalar,
        _aten.div_.Tensor,
        _aten.div_.Scalar,
        _aten.clamp_.default,
        _aten.clamp_min_.default,
        _aten.clamp_max_.default,
        _aten.nan_to_num_.default,
        _aten.zero_.default,
    )
)


class WholeGradients(Protocol):
    """Information of all ranks about the gradients of one optimizer."""

    def norm(self, gradient: ShardedGradient, order: float) -> torch.Tensor:
        """Return the norm of a whole gradient, 0-dimensional; collective at the first call since changed()."""

    def changed(self) -> None:
        """Record that shards have new values; not collective."""

    def spread(self, found: torch.Tensor) -> None:
        """Set `found` (1,) to the largest value of all ranks; collective."""


class ShardedGradient(torch.Tensor):
    """`grad` of a parameter after a reduce-scatter: this rank's slices of the average, without memory for the rest.

    torch.nn.utils.clip_grad_norm_, clip_grad_value_ and GradScaler work with it as with whole gradients; the norm and
    the scaler's test are collective. All other operations raise RuntimeError.

    owner: name of the parameter. pieces: this rank's slices, (n,) each; may be empty. whole: for collective operations.
    """

    owner: str
    pieces: Sequence[torch.Tensor]
    whole: WholeGradients

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[ShardedGradient],
        parameter: nn.Parameter,
        name: str,
        pieces: Sequence[torch.Tensor],
        whole: WholeGradients,
    ) -> ShardedGradient:
        """Make a gradient with the parameter's shape, dtype and device.

        parameter: owner of the gradient.
        name: of the parameter.
        pieces: this rank's slices.
        whole: for collective operations.
        """
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.owner, made.pieces, made.whole = name, pieces, whole
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the gradient without a collective."""
        held = sum(piece.numel() for piece in self.pieces)
        return f"ShardedGradient({self.owner}, {held} of {self.numel()} elements on this rank)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the slices. Raises RuntimeError for one that needs the whole gradient."""
        kwargs = kwargs or {}
        first = args[0]
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            pieces = [piece for gradient in first for piece in gradient.pieces]
            if pieces:
                func(pieces, *args[1:], **kwargs)
            first[0].whole.changed()
            first[0].whole.spread(args[1])
            return None
        others = [other for other in (*args[1:], *kwargs.values()) if isinstance(other, torch.Tensor)]
        if isinstance(first, ShardedGradient) and all(other.dim() == 0 for other in others):
            if func is _aten.detach.default:
                return first
            if func is _aten.linalg_vector_norm.default and (len(args) < 3 or args[2] is None):
                order = float(args[1]) if len(args) > 1 else 2.0
                return first.whole.norm(first, order).to(first.device, kwargs.get("dtype") or first.dtype)
            if func in _IN_PLACE:
                for piece in first.pieces:
                    func(piece, *args[1:], **kwargs)
                first.whole.changed()
                return first
        mine = next(one for one in _flat(args) if isinstance(one, ShardedGradient))
        raise RuntimeError(
            f'With shard="gradients" this rank has {sum(piece.numel() for piece in mine.pieces)} of {mine.numel()} '
            f"elements of the gradient of {mine.owner}, so {func} is not possible. clip_grad_norm_, clip_grad_value_ "
            'and GradScaler are. To read whole gradients use shard="optimizer". If this was raised in backward() or '
            "step(), gradients that are reduced already would be used again: call optimizer.zero_grad() after each "
            "step() (model.zero_grad(set_to_none=False) keeps the gradient), and pass backward_passes_per_step to "
            "accumulate."
        )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [inner for one in value for inner in _flat(one)]
    return [value]
