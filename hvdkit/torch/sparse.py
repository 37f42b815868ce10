"""Sparse gradients (of embeddings, say): rows from all ranks, gathered and added up."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hvdkit.torch.layout import Named
from hvdkit.torch.tensors import as_buffer, as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import allgather_object, gather_ints


class SparseGradients:
    """The parameters of one optimizer whose gradients are sparse on some rank; the same on all ranks.

    average: divide sums by the number of ranks. indices: of the parameters, in rising order.
    """

    def __init__(self, *, average: bool) -> None:
        self._average = average
        self.indices: list[int] = []

    def agree(self, transport: Transport, named: Named) -> None:
        """Find out which gradients are sparse on any rank, beside those that were so before; collective."""
        gradients = [parameter.grad for _, parameter in named]
        here = [index for index, gradient in enumerate(gradients) if gradient is not None and gradient.is_sparse]
        self.indices = sorted(set().union(*allgather_object(transport, here)) | set(self.indices))

    def reduce(self, transport: Transport, named: Named, written: Collection[int]) -> None:
        """Add them up; collective. written: indices of the parameters whose gradients this rank has to give."""
        for index in self.indices:
            parameter = named[index][1]
            gradient = parameter.grad if index in written else None
            reduced = reduce_sparse(transport, gradient, parameter, average=self._average)
            if reduced is not None:
                parameter.grad = reduced

    def contribute_nothing(self, transport: Transport, named: Named) -> None:
        """The part in reduce() of a rank that has joined; it keeps its gradients. Collective."""
        for index in self.indices:
            reduce_sparse(transport, None, named[index][1], average=self._average)


def reduce_sparse(
    transport: Transport, gradient: torch.Tensor | None, like: torch.Tensor, *, average: bool
) -> torch.Tensor | None:
    """Add up the ranks' sparse gradients of one parameter; collective.

    gradient: sparse COO of like's shape, sparse in the first dimension alone; None counts as nothing.
    Returns it coalesced, divided by the number of ranks for an average; None if no rank has any.
    """
    have = gather_ints(transport, -1 if gradient is None else 1)
    if max(have) < 0:
        return None
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
    summed = torch.sparse_coo_tensor(
        all_indices.view(1, -1), joined.view(-1, *like.shape[1:]), like.shape, check_invariants=False
    ).coalesce()
    if average:
        summed = summed / transport.size
    return summed.to(like.device)
