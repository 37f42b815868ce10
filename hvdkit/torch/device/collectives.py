"""Begins the collectives of named operations in a process group, by the backend's calls or combinations of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hvdkit.torch.device import calls
from hvdkit.torch.device.group import TorchGroup, Work

_MOST_TOGETHER = 32  # limit of allreduces in one call of the backend


def all_reduce(group: TorchGroup, tensors: Sequence[torch.Tensor], op: str) -> list[Work]:
    """Reduce tensors of one dtype in place; many small ones by one call. op: "sum", "product", "min" or "max"."""
    parts = [tensors[first : first + _MOST_TOGETHER] for first in range(0, len(tensors), _MOST_TOGETHER)]
    return [group.begin(calls.allreduce(group.backend, part, op)) for part in parts]


def broadcast(group: TorchGroup, memory: torch.Tensor, root: int) -> list[Work]:
    """Overwrite the memory with the root's."""
    return [group.begin(calls.broadcast(group.backend, memory, root))] if memory.numel() else []


def all_gather(group: TorchGroup, memory: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[Work]]:
    """Concatenate all ranks' memory in new memory.

    group: the process group of the ranks.
    memory: (counts[rank],), this rank's numbers.
    counts: elements of each rank.
    """
    result = memory.new_empty(sum(counts))
    if len(set(counts)) == 1:
        return result, [group.begin(calls.allgather(group.backend, memory, result))] if counts[0] else []
    works = []
    for rank, piece in enumerate(_pieces(result, counts)):  # no gather of different counts is common to all backends
        if rank == group.rank:
            piece.copy_(memory)
        works += broadcast(group, piece, rank)
    return result, works


def all_to_all(
    group: TorchGroup, memory: torch.Tensor, sent: Sequence[int], received: Sequence[int]
) -> tuple[torch.Tensor, list[Work]]:
    """Send the i-th slice of the memory to rank i, and receive the i-th slice of new memory from it.

    group: the process group of the ranks.
    memory: (sum(sent),).
    sent: elements for each rank.
    received: elements from each rank.
    """
    result = memory.new_empty(sum(received))
    return result, [group.begin(calls.all_to_all(group.backend, memory, result, sent, received))]


def reduce_scatter(
    group: TorchGroup, memory: torch.Tensor, counts: Sequence[int], op: str
) -> tuple[torch.Tensor, list[Work]]:
    """Reduce the memory, which may be overwritten; returns this rank's slice.

    group: the process group of the ranks.
    memory: (sum(counts),).
    counts: elements of each rank's slice.
    op: as in all_reduce().
    """
    longest, rank = max(counts), group.rank
    whole = memory
    if len(set(counts)) > 1:  # slices of equal length, of which the last elements of some are not used
        padded = memory.new_zeros(len(counts), longest)
        for target, piece in zip(padded, _pieces(memory, counts), strict=True):
            target[: len(piece)].copy_(piece)
        whole = padded.view(-1)
    own = whole[rank * longest : (rank + 1) * longest]
    works = [group.begin(calls.reduce_scatter(group.backend, own, whole, op))] if longest else []
    return own[: counts[rank]], works


def _pieces(memory: torch.Tensor, counts: Sequence[int]) -> Iterator[torch.Tensor]:
    at = 0
    for count in counts:
        yield memory[at : at + count]
        at += count
