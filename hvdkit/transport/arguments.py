"""Checks of a collective's arguments, the same for all transports. All raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence


def check_counts(call: str, counts: Sequence[int], size: int, *, total: int | None) -> None:
    """One count from 0 up per rank, together `total` elements (any number if None)."""
    if len(counts) != size or any(count < 0 for count in counts):
        raise ValueError(f"{call}: counts is {list(counts)}; it must be {size} numbers from 0 up, one for each rank")
    if total is not None and sum(counts) != total:
        raise ValueError(f"{call} has {total} elements, but the counts {list(counts)} add up to {sum(counts)}")


def check_alltoall(send: Sequence[int], receive: Sequence[int], rank: int, size: int, *, total: int) -> None:
    """Counts of alltoall that fit a buffer of `total` elements, and each other where a rank sends to itself."""
    check_counts("alltoall", send, size, total=total)
    check_counts("alltoall", receive, size, total=None)
    if send[rank] != receive[rank]:
        raise ValueError(f"alltoall: rank {rank} sends {send[rank]} elements to itself but expects {receive[rank]}")


def check_root(root: int, size: int) -> None:
    """A root that is one of the ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root is {root}; it must be a rank from 0 to {size - 1}")


#: Tags of messages: as many as every MPI has.
TAGS = 32768


def check_message(peer: int, tag: int, rank: int, size: int) -> None:
    """Another rank of the group, and a tag."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(f"peer is {peer}; it must be a rank from 0 to {size - 1} other than this one, {rank}")
    if not 0 <= tag < TAGS:
        raise ValueError(f"tag is {tag}; it must be from 0 to {TAGS - 1}")
