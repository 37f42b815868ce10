"""Schedules: the messages of each algorithm of an allreduce between hosts, as pure plans.

Every element's sum is either made by one rank and handed on, or made by several from the same numbers in the same
order; so all ranks end with the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple


class Move(NamedTuple):
    """Elements from `start` up to `stop`, to or from a rank."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """What a rank sends and receives at the same time.

    adds: the elements, as (start, stop), to which everything received is added, in the order of ranks; None where what
    is received takes the place of what was there.
    """

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    adds: tuple[int, int] | None = None


def split_evenly(count: int, parts: int) -> list[int]:
    """Sizes of `parts` pieces of `count` elements; the first ones are one longer where it does not divide."""
    size, longer = divmod(count, parts)
    return [size + (part < longer) for part in range(parts)]


def _pieces(rank: int, size: int, count: int) -> list[Round]:
    """A piece straight to everyone, and its sum straight back."""
    pieces = list(itertools.pairwise([0, *itertools.accumulate(split_evenly(count, size))]))
    others = [(rank + ahead) % size for ahead in range(1, size)]
    own = pieces[rank]
    return [
        Round(tuple(Move(peer, *pieces[peer]) for peer in others), tuple(Move(peer, *own) for peer in others), own),
        Round(tuple(Move(peer, *own) for peer in others), tuple(Move(peer, *pieces[peer]) for peer in others)),
    ]


def _folded(rank: int, size: int, count: int, within: Callable[[int, int, int], list[Round]]) -> list[Round]:
    """`within` among a power of two of ranks; each of the others gives to one of them first, and takes at the end."""
    inner, every = 1 << (size.bit_length() - 1), (0, count)
    if rank >= inner:
        partner = Move(rank - inner, *every)
        return [Round((partner,), ()), Round((), (partner,))]
    rounds = within(rank, inner, count)
    if rank + inner >= size:
        return rounds
    partner = Move(rank + inner, *every)
    return [Round((), (partner,), every), *rounds, Round((partner,), ())]


def _doubling(rank: int, size: int, count: int) -> list[Round]:
    """All of it to a partner twice as far each time."""
    every, masks = (0, count), [1 << bit for bit in range(size.bit_length() - 1)]
    return [Round((Move(rank ^ mask, *every),), (Move(rank ^ mask, *every),), every) for mask in masks]


def _halving(rank: int, size: int, count: int) -> list[Round]:
    """Half of what is left to a partner half as far each time, and the same way back (Rabenseifner)."""
    start, stop = 0, count
    there, back = [], []
    for bit in reversed(range(size.bit_length() - 1)):
        partner, middle = rank ^ (1 << bit), (start + stop) // 2
        kept, given = (start, middle), (middle, stop)
        if rank >> bit & 1:
            kept, given = given, kept
        there.append(Round((Move(partner, *given),), (Move(partner, *kept),), kept))
        back.append(Round((Move(partner, *kept),), (Move(partner, *given),)))
        start, stop = kept
    return there + back[::-1]


SCHEDULES: dict[str, Callable[[int, int, int], list[Round]]] = {
    "doubling": lambda rank, size, count: _folded(rank, size, count, _doubling),
    "halving": lambda rank, size, count: _folded(rank, size, count, _halving),
    "pieces": _pieces,
}


@functools.lru_cache(maxsize=256)
def plan_rounds(algorithm: str, rank: int, size: int, count: int) -> tuple[Round, ...]:
    """The rounds of one rank for `count` elements, without moves and rounds that are empty."""

    def there(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if move.start < move.stop)

    rounds = [Round(there(one.sends), there(one.receives), one.adds) for one in SCHEDULES[algorithm](rank, size, count)]
    return tuple(one for one in rounds if one.sends or one.receives)


def largest_part(algorithm: str, size: int) -> int:
    """Into how many parts the largest message of an algorithm divides what it reduces."""
    whole = size & (size - 1) == 0  # else some ranks give all they have to others first
    return {"pieces": size, "halving": 1 + whole}.get(algorithm, 1)
