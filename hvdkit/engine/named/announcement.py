"""What a rank says it has, and what all ranks hear when everyone has it."""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, ...]


class Announcement(NamedTuple):
    """One rank's wish for an operation.

    kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or a word for a step of several (see
    together.py). tensors: (dtype, shape) of each tensor of the operation, a group having several. options: what all
    ranks must say alike, as (word, value). splits: rows for each rank, of an alltoall; the ranks' own.
    """

    kind: str
    tensors: tuple[tuple[str, Shape], ...]
    options: tuple[tuple[str, str], ...] = ()
    splits: tuple[int, ...] = ()


class Ready(NamedTuple):
    """All ranks have it: do it now. name: of the operation.

    asked: as one of the ranks announced it. rows: for each rank, of an allgather the first dimension of each tensor, of
    an alltoall the splits. joined: ranks that take part with zeros. lane: the first position of the lane that no rank
    has shown this operation at. number: by which it is known from now on, see roll_call.py; -1 for none.
    """

    name: str
    asked: Announcement
    rows: tuple[tuple[int, ...], ...] = ()
    joined: tuple[int, ...] = ()
    lane: int = 0
    number: int = -1
