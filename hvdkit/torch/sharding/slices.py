"""Slice: a segment of a parameter as the inner optimizer gets it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.torch.layout import arrange
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.sharding.state import Layout, flatten


@dataclass
class Slice:
    """A segment of a parameter as the inner optimizer gets it.

    piece: the segment, in the parameter's elements in the order of `layout`. tensor: (count,), a view of the
    parameter's memory, or a copy: for a float32 master weight, or because that memory now has another order. address:
    of the parameter's memory; 0 for a copy. version: of the parameter when the master weight was written to it.
    received: (count,), the reduce-scattered gradient in the parameter's dtype.
    """

    owner: torch.nn.Parameter
    layout: Layout
    piece: TensorRange
    tensor: torch.nn.Parameter
    is_master: bool
    address: int = 0
    version: int = 0
    received: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Its number of elements."""
        return self.piece.count

    def _values(self) -> torch.Tensor:
        """Return a view of the parameter's memory, or a copy if that has another order."""
        return flatten(self.owner.detach(), self.layout.strides)[self.piece.elements]

    def renew(self) -> None:
        """Adopt values that others than this optimizer have written."""
        if self.is_master:
            if self.owner._version != self.version:
                values = self._values()
                self.tensor.data = torch.where(self.tensor.to(values.dtype) == values, self.tensor, values.float())
        elif self.owner.stride() != self.layout.strides:
            self.tensor.data, self.address = self._values().clone(), 0
        elif self.owner.data_ptr() != self.address:
            self.tensor.data, self.address = self._values(), self.owner.data_ptr()

    def write(self) -> None:
        """Copy the values to the parameter, if `tensor` is a copy."""
        if self.is_master or not self.address:
            whole = arrange(self.owner.detach(), self.layout.strides)
            flatten(whole)[self.piece.elements].copy_(self.tensor)
            if self.owner.stride() != self.layout.strides:
                self.owner.copy_(whole)

    def gradient(self) -> torch.Tensor | None:
        """Return the slice of the parameter's gradient, in the dtype of `tensor`."""
        gradient = self.owner.grad
        if gradient is None:
            return None
        if isinstance(gradient, ShardedGradient):
            assert self.received is not None
            return self.received.to(self.tensor.dtype)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach().resolve_conj()
        flat = flatten(gradient, self.layout.strides)
        return flat[self.piece.elements].to(self.tensor.dtype)


def make_slice(owner: torch.nn.Parameter, layout: Layout, piece: TensorRange, *, master_weights: bool) -> Slice:
    """Make a slice; in float32 for a float16 or bfloat16 parameter with master weights.

    owner: the parameter.
    layout: of the parameter as it is now.
    piece: the segment.
    master_weights: keep float32 values.
    """
    view = flatten(owner.detach(), layout.strides)[piece.elements]
    is_master = master_weights and owner.dtype in (torch.float16, torch.bfloat16)
    tensor = torch.nn.Parameter(view.float() if is_master else view)
    return Slice(owner, layout, piece, tensor, is_master, owner.data_ptr(), owner._version)
