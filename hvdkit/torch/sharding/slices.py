"""Pieces of parameters as the inner optimizer gets them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvdkit.engine.sharding.pieces import Piece
from hvdkit.torch.layout import strides_of
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.sharding.state import flatten


@dataclass
class Slice:
    """A piece of a parameter as the inner optimizer gets it.

    piece: which. tensor: (count,), a view of the parameter's memory or, for a master weight, a float32 copy. address:
    of the parameter's memory. version: of the parameter when the master weight was written to it. received: (count,),
    the gradient in the parameter's dtype, where gradients are reduce-scattered.
    """

    owner: torch.nn.Parameter
    piece: Piece
    tensor: torch.nn.Parameter
    is_master: bool
    address: int = 0
    version: int = 0
    received: torch.Tensor | None = None

    @property
    def offset(self) -> int:
        """Its first element in the parameter."""
        return self.piece.offset

    @property
    def count(self) -> int:
        """Its number of elements."""
        return self.piece.count

    def view(self) -> torch.Tensor:
        """The piece in the parameter's memory."""
        return flatten(self.owner.detach())[self.offset : self.offset + self.count]

    def renew(self) -> None:
        """Take note of values that others than this optimizer have written."""
        if self.is_master:
            if self.owner._version != self.version:
                view = self.view()
                self.tensor.data = torch.where(self.tensor.to(view.dtype) == view, self.tensor, view.float())
        elif self.owner.data_ptr() != self.address:
            self.tensor.data = self.view()
            self.address = self.owner.data_ptr()

    def gradient(self) -> torch.Tensor | None:
        """The piece of the parameter's gradient, in the dtype of `tensor`."""
        gradient = self.owner.grad
        if gradient is None:
            return None
        if isinstance(gradient, ShardedGradient):
            assert self.received is not None
            return self.received.to(self.tensor.dtype)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach().resolve_conj()
        flat = flatten(gradient, strides_of(self.owner))
        return flat[self.offset : self.offset + self.count].to(self.tensor.dtype)


def make_slice(owner: torch.nn.Parameter, piece: Piece, *, master_weights: bool) -> Slice:
    """The slice of a piece; in float32 for a float16 or bfloat16 parameter where it is to have master weights."""
    view = flatten(owner.detach())[piece.offset : piece.offset + piece.count]
    is_master = master_weights and owner.dtype in (torch.float16, torch.bfloat16)
    tensor = torch.nn.Parameter(view.float() if is_master else view)
    return Slice(owner, piece, tensor, is_master, owner.data_ptr(), owner._version)
