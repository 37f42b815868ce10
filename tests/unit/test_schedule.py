"""The algorithms between hosts as plans: every rank ends with the same bits, however many there are."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.transport.between.schedules import SCHEDULES, Round, largest_part, plan_rounds
from hvdkit.transport.buffer import Array


def play(plans: list[tuple[Round, ...]], numbers: list[Array]) -> None:
    """Do what the plans say; each rank waits only for its own round. Raises AssertionError if they wait for ever."""
    boxes: defaultdict[tuple[int, int], deque[Array]] = defaultdict(deque)
    left = [deque(plan) for plan in plans]
    sent = [False] * len(plans)
    moved = True
    while moved:
        moved = False
        for rank, rounds in enumerate(left):
            if not rounds:
                continue
            one, own = rounds[0], numbers[rank]
            if not sent[rank]:
                sent[rank] = moved = True
                for peer, start, stop in one.sends:
                    boxes[rank, peer].append(own[start:stop].copy())
            if not all(boxes[move.peer, rank] for move in one.receives):
                continue
            got = {move.peer: boxes[move.peer, rank].popleft() for move in one.receives}
            if one.adds is None:
                for peer, start, stop in one.receives:
                    own[start:stop] = got[peer]
            else:
                got[rank] = own[slice(*one.adds)].copy()
                total, *others = (got[peer] for peer in sorted(got))
                for other in others:
                    total = total + other
                own[slice(*one.adds)] = total
            rounds.popleft()
            sent[rank], moved = False, True
    assert not any(left), "ranks wait for one another"
    assert not any(boxes.values()), "something was sent that nobody receives"


@pytest.mark.parametrize("algorithm", SCHEDULES)
@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 17), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_all_ranks_get_the_sum_and_the_same_bits(algorithm: str, size: int, count: int, seed: int) -> None:
    numbers = list(np.random.default_rng(seed).standard_normal((size, count)).astype(np.float32))
    expected = np.sum(numbers, axis=0, dtype=np.float64)
    play([plan_rounds(algorithm, rank, size, count) for rank in range(size)], numbers)
    assert len({one.tobytes() for one in numbers}) == 1
    np.testing.assert_allclose(numbers[0], expected, atol=1e-4)


@pytest.mark.parametrize("algorithm", SCHEDULES)
@given(size=st.integers(2, 17), count=st.integers(0, 400))
def test_no_message_is_larger_than_announced_and_none_is_empty(algorithm: str, size: int, count: int) -> None:
    largest = -(-count // largest_part(algorithm, size))
    for rank in range(size):
        for one in plan_rounds(algorithm, rank, size, count):
            assert all(0 < stop - start <= largest for _, start, stop in (*one.sends, *one.receives))


def test_how_many_bytes_and_rounds_each_algorithm_takes() -> None:
    size, count = 8, 800

    def cost(algorithm: str) -> tuple[int, int]:
        plans = [plan_rounds(algorithm, rank, size, count) for rank in range(size)]
        sent = [sum(stop - start for one in plan for _, start, stop in one.sends) for plan in plans]
        return max(map(len, plans)), max(sent)

    assert {name: cost(name) for name in SCHEDULES} == {
        "doubling": (3, 2400),
        "halving": (6, 1400),
        "pieces": (2, 1400),
    }
