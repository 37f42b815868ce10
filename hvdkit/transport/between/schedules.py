"""Plans the messages of each algorithm of an allreduce between hosts, by pure functions.

For each element, either one rank makes the sum and sends it on, or several ranks make it from the same numbers in the
same order. So all ranks end with the same bits.
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
    """The messages that a rank sends and receives at the same time.

    adds: the elements, as (start, stop), to which all received numbers are added, in the order of ranks; None if the
    received numbers replace the previous ones.
    """

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    adds: tuple[int, int] | None = None


def split_evenly(count: int, parts: int) -> list[int]:
    """Return the sizes of `parts` nearly equal slices of `count` elements; the first slices have the remainder."""
    size, longer = divmod(count, parts)
    return [size + (part < longer) for part in range(parts)]


def _pieces(rank: int, size: int, count: int) -> list[Round]:
    """Send each rank its slice directly, and receive the sum of each slice directly."""
    pieces = list(itertools.pairwise([0, *itertools.accumulate(split_evenly(count, size))]))
    others = [(rank + ahead) % size for ahead in range(1, size)]
    own = pieces[rank]
    return [
        Round(tuple(Move(peer, *pieces[peer]) for peer in others), tuple(Move(peer, *own) for peer in others), own),
        Round(tuple(Move(peer, *own) for peer in others), tuple(Move(peer, *pieces[peer]) for peer in others)),
    ]


def _folded(rank: int, size: int, count: int, within: Callable[[int, int, int], list[Round]]) -> list[Round]:
    """Run `within` on a power of two of ranks; each other rank sends to one of them first, and receives at the end."""
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
    """Exchange all elements with a partner whose distance doubles each round (recursive doubling)."""
    every, masks = (0, count), [1 << bit for bit in range(size.bit_length() - 1)]
    return [Round((Move(rank ^ mask, *every),), (Move(rank ^ mask, *every),), every) for mask in masks]


def _halving(rank: int, size: int, count: int) -> list[Round]:
    """Send half of the remaining elements to a partner at half the distance each round, then reverse (Rabenseifner)."""
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
    """Plan the rounds of one rank, without empty moves and rounds.

    algorithm: a name in SCHEDULES.
    rank: the rank whose rounds are planned.
    size: number of ranks.
    count: number of elements.
    """

    def there(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if move.start < move.stop)

    rounds = [Round(there(one.sends), there(one.receives), one.adds) for one in SCHEDULES[algorithm](rank, size, count)]
    return tuple(one for one in rounds if one.sends or one.receives)


def largest_part(algorithm: str, size: int) -> int:
    """Return how many times smaller than the reduced numbers an algorithm's largest message is."""
    whole = size & (size - 1) == 0  # else some ranks first send all their numbers to others
    return {"pieces": size, "halving": 1 + whole}.get(algorithm, 1)
