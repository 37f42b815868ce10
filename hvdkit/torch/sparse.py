"""Sparse gradients (of embeddings, say): rows from all ranks, gathered and added up."""

from __future__ import annotations

import torch

from hvdkit.torch.tensors import as_buffer, as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import gather_ints


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
