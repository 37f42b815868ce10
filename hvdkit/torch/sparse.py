"""Sparse gradients, as of embeddings: the rows of all ranks are gathered and summed."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hvdkit.torch.layout import Named
from hvdkit.torch.tensors import as_buffer, as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import allgather_object, gather_ints


class SparseGradients:
    """The parameters of one optimizer whose gradients are sparse on some rank; the same on all ranks.

    average: divide sums by the number of ranks. indices: of the parameters, ascending.
    """

    def __init__(self, *, average: bool) -> None:
        self._average = average
        self.indices: list[int] = []

    def agree(self, transport: Transport, named: Named) -> None:
        """Add to `indices` the parameters whose gradients are sparse on any rank; collective."""
        gradients = [parameter.grad for _, parameter in named]
        here = [index for index, gradient in enumerate(gradients) if gradient is not None and gradient.is_sparse]
        self.indices = sorted(set().union(*allgather_object(transport, here)) | set(self.indices))

    def reduce(self, transport: Transport, named: Named, written: Collection[int]) -> None:
        """Sum the sparse gradients; collective. written: indices of the parameters with a gradient on this rank."""
        for index in self.indices:
            parameter = named[index][1]
            gradient = parameter.grad if index in written else None
            reduced = reduce_sparse(transport, gradient, parameter, average=self._average)
            if reduced is not None:
                parameter.grad = reduced

    def contribute_nothing(self, transport: Transport, named: Named) -> None:
        """Take part in reduce() without gradients, as a joined rank, which keeps its own; collective."""
        for index in self.indices:
            reduce_sparse(transport, None, named[index][1], average=self._average)


_NONE, _SPARSE, _DENSE = range(3)


def reduce_sparse(
    transport: Transport, gradient: torch.Tensor | None, like: torch.Tensor, *, average: bool
) -> torch.Tensor | None:
    """Sum the ranks' gradients of one parameter; collective.

    gradient: of like's shape, dense, or sparse COO in the first dimension alone; None counts as zeros.
    Returns a dense gradient if it is dense on any rank, as a single process would, else a coalesced sparse one; divided
    by the number of ranks for an average; None if no rank has one.
    """
    kind = max(gather_ints(transport, _NONE if gradient is None else _SPARSE if gradient.is_sparse else _DENSE))
    if kind == _NONE:
        return None
    summed = (_add_dense if kind == _DENSE else _add_rows)(transport, gradient, like)
    if average:
        summed = summed / transport.size
    return summed.to(like.device)


def _add_dense(transport: Transport, gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    host = torch.zeros(like.shape, dtype=like.dtype)
    if gradient is not None:
        host.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
    transport.allreduce(as_buffer(host), "sum")
    return host


def _add_rows(transport: Transport, gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        indices = torch.empty(0, dtype=torch.int64)
        values = torch.empty(0, *like.shape[1:], dtype=like.dtype)
    else:
        local = gradient.coalesce()
        indices = local.indices()[0].cpu().contiguous()
        values = local.values().cpu().contiguous()
    rows = gather_ints(transport, indices.numel())
    width = values[0].numel() if indices.numel() else like[0].numel()
    all_indices = as_tensor(transport.allgather(as_buffer(indices), rows))
    joined = as_tensor(transport.allgather(as_buffer(values), [count * width for count in rows]))
    return torch.sparse_coo_tensor(
        all_indices.view(1, -1), joined.view(-1, *like.shape[1:]), like.shape, check_invariants=False
    ).coalesce()
