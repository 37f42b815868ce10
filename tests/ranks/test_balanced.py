from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd
from hvdkit.balance.load_balancer import LoadBalancer
from hvdkit.balance.shares import Balance, Plans, part_of_batch, shares, step_s
from hvdkit.log import logger
from hvdkit.torch.data import repeated_order
from hvdkit.torch.data.balanced import weighted
from hvdkit.training.sharding import plan_order

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


@given(SPEEDS, st.integers(0, 500), st.integers(0, 3))
def test_shares_are_a_whole_batch_in_the_order_of_speeds(speeds: list[float], extra: int, least: int) -> None:
    rows = least * len(speeds) + extra
    plan = shares(speeds, rows, least=least)
    assert sum(plan) == rows
    assert min(plan) >= least
    for (mine, my_speed), (other, other_speed) in product(zip(plan, speeds, strict=True), repeat=2):
        assert mine >= other or my_speed <= other_speed
    assert shares([3 * speed for speed in speeds], rows, least=least) == plan or step_s(
        shares([3 * speed for speed in speeds], rows, least=least), speeds
    ) == pytest.approx(step_s(plan, speeds)), "only their ratios count"


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.integers(0, 12), st.integers(0, 1))
def test_no_other_division_ends_earlier(speeds: list[float], extra: int, least: int) -> None:
    rows = least * len(speeds) + extra
    others = [each for each in product(range(least, rows + 1), repeat=len(speeds)) if sum(each) == rows]
    best = min(step_s(each, speeds) for each in others)
    assert step_s(shares(speeds, rows, least=least), speeds) <= best * (1 + 1e-9)


@given(SPEEDS.filter(lambda speeds: len(speeds) > 1), st.integers(0, 300), st.floats(1, 100))
def test_a_rank_that_becomes_faster_does_not_get_less(speeds: list[float], extra: int, times: float) -> None:
    rows = len(speeds) + extra
    faster = [speeds[0] * times, *speeds[1:]]
    assert shares(faster, rows)[0] >= shares(speeds, rows)[0]


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf], [1.0] * 9])
def test_what_cannot_be_divided_is_refused(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"above 0|too few"):
        shares(speeds, 8)


def test_speeds_may_be_an_array() -> None:
    speeds: Any = np.array([3.0, 2.0, 1.0])
    assert Balance(12, 3, speeds).plan == (6, 4, 2)


class FewRanks:
    """Stands for a transport."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size


def test_in_a_new_world_old_ranks_divide_as_new_ones_do() -> None:
    worlds: list[Any] = [FewRanks(size) for size in (3, 2, 3)]
    first, *later = worlds
    old = LoadBalancer("it", 12, 10, first, [3.0, 2.0, 1.0])
    plans = []
    for world in later:
        assert not old.belongs_to(world)
        old.enter(world)
        plans.append(old.plan)
    assert plans == [(6, 6), (6, 4, 2)]


class Together:
    """Stands for what drives the optimizer; says on what the ranks agreed in each step."""

    def __init__(self) -> None:
        self.said: list[dict[str, str]] = []

    def together(self, kind: str, action: Any, options: Any = ()) -> None:
        self.said.append(dict(options))
        action(None, ())


def test_ranks_compare_their_arguments_in_the_first_step() -> None:
    caller = Together()
    mine = LoadBalancer("it", 12, 10, None)
    for _ in range(9):
        mine.stepped(caller, 12, lambda: 1.0, lambda: (0, 0), [("seed", 3)])
    assert caller.said == [{"seed": "3", "every": "10", "plan": "(12,)"}]


def hear_often(balance: Balance, row_s: list[float], times: int = 6, fixed_s: float = 0.0) -> list[bool]:
    """What a balance does when ranks compute so long for a row, and some time in addition."""
    return [
        balance.add_times([each + fixed_s / rows for each, rows in zip(row_s, balance.plan, strict=True)])
        for _ in range(times)
    ]


def test_a_rank_that_slows_down_gets_less_and_one_that_recovers_gets_more() -> None:
    balance = Balance(70, 3)
    assert list(balance.plan) == [24, 23, 23]
    hear_often(balance, [1.0, 1.0, 3.0])
    assert list(balance.plan) == [30, 30, 10]
    hear_often(balance, [1.0, 1.0, 1.0], 10)
    assert max(balance.plan) <= 1.08 * 70 / 3, "within what is worth a change"
    hear_often(balance, [1.0, 1.0, 1000.0], 12)
    assert min(balance.plan) == balance.plan[2] < 3


def test_noise_changes_nothing_and_times_without_rows_are_balanced_too() -> None:
    balance = Balance(300, 3, [1, 1, 1])
    assert not any(balance.add_times([1.0, 1.0 + noise, 1.0 - noise]) for noise in (0.03, -0.03, 0.04, 0.0, 0.02))
    hear_often(balance, [1.0, 1.0, 3.0], 20, fixed_s=40)
    ends = [rows * each + 40 for rows, each in zip(balance.plan, [1.0, 1.0, 3.0], strict=True)]
    assert max(ends) <= 1.06 * (sum(ends) / 3)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 99))
def test_shares_are_whole_grains(speeds: list[float], grain: int, extra: int) -> None:
    rows = grain * len(speeds) + extra
    plan = Balance(rows, len(speeds), speeds, grain).plan
    assert sum(plan) == rows
    assert min(plan) >= grain
    assert sorted(share % grain for share in plan)[:-1] == [0] * (len(speeds) - 1)


def test_a_rank_that_has_measured_nothing_keeps_its_time() -> None:
    balance = Balance(12, 2)
    assert not balance.add_times([1.0, math.nan])
    assert balance.add_times([1.0, 3.0])
    assert balance.plan == (9, 3)
    assert not balance.add_times([math.nan, math.nan])


def test_the_last_batch_is_divided_like_the_others() -> None:
    assert part_of_batch((6, 4, 2), 12) == (6, 4, 2)
    assert part_of_batch((6, 4, 2), 6) == (3, 2, 1)
    assert part_of_batch((6, 4, 2), 1) == (1, 0, 0)


@given(st.lists(st.tuples(st.tuples(st.integers(0, 3), st.integers(0, 9)), st.integers(1, 9)), max_size=6))
def test_a_batch_has_the_newest_plan_at_its_position(changes: list[tuple[tuple[int, int], int]]) -> None:
    changes.sort()
    plans = Plans((0,))
    for position, plan in changes:
        plans.change(position, (plan,))
    for position in product(range(4), range(10)):
        expected = [0, *(plan for change, plan in changes if change <= position)][-1]
        assert plans.at(position) == (expected,)
    for position in product(range(4), range(10)):
        plans.forget(position)
        expected = [0, *(plan for change, plan in changes if change <= position)][-1]
        assert plans.at(position) == (expected,)


ROWS, BATCH, EPOCHS = 50, 12, 3  # the last batch of an epoch has 2 rows, fewer than there are ranks


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model.double()


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[list[torch.Tensor]]) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def train_alone() -> list[float]:
    """One process with the whole batch."""
    model, data = make_model(), make_data()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(plan_order(ROWS, seed=0, epoch=epoch))
        train(model, optimizer, iter([list(data[rows]) for rows in order.split(BATCH)]))
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()


class Paced:
    """Stands for the clock of a rank that needs so long for a row."""

    def __init__(self, sampler: hvd.data.BalancedSampler, row_s: Callable[[int], float]) -> None:
        self._sampler, self._row_s, self._steps = sampler, row_s, 0
        self._rows = 0

    def restart(self) -> None:
        pass

    def gradient(self, _: torch.Tensor) -> None:
        self._rows = self._sampler._current[0]

    def step(self) -> Callable[[], float]:
        seconds = self._rows * self._row_s(self._steps)
        self._steps += 1
        return lambda: seconds


def train_balanced(workers_of_first: int, shard: str | None) -> tuple[list[float], list[tuple[int, ...]]]:
    """Rank 2 is slow for the first two epochs, then all are alike; the plans, and the parameters in the end."""
    hvd.init()
    model, data = make_model(), make_data()
    model[0].weight.requires_grad_(False)  # unfrozen below
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), shard=shard)
    sampler = hvd.data.BalancedSampler(data, BATCH, optimizer, every=2)
    model[0].weight.requires_grad_(True)
    slow = hvd.rank() == 2
    sampler._clock = Paced(sampler, lambda steps: 3.0 if slow and steps < 10 else 1.0)  # type: ignore[assignment]
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers_of_first if hvd.rank() == 0 else 0)
    plans = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(loader))
        plans.append(sampler.plan)
        assert sampler.state_dict() == {"epoch": epoch, "used": ROWS, "seed": 0}
    assert sampler.weight == 1.0
    hvd.shutdown()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(), plans


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("workers", "shard"),
    [(1, None), pytest.param(0, "gradients", marks=pytest.mark.slow)],
    ids=["a loading process on one rank", "sharded"],
)
def test_unequal_rows_train_as_one_process_with_the_whole_batch(workers: int, shard: str | None) -> None:
    expected = train_alone()
    for parameters, plans in run_ranks(3, train_balanced, workers, shard):
        assert plans[0] == plans[1] == (6, 5, 1)
        assert plans[2][2] > plans[1][2], "it has recovered"
        assert parameters == pytest.approx(expected, abs=1e-9)


def train_through_a_new_world() -> list[tuple[int, ...]]:
    hvd.init()
    model, data = make_model(), make_data()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01))
    sampler = hvd.data.BalancedSampler(data, BATCH, optimizer, every=3)
    loader = DataLoader(data, batch_sampler=sampler)
    plans = []
    for slow in (2, 0):
        row_s = 3.0 if hvd.rank() == slow else 1.0
        sampler._clock = Paced(sampler, lambda _, row_s=row_s: row_s)  # type: ignore[assignment,misc]
        iterator = iter(loader)
        train(model, optimizer, iter([next(iterator)]))
        plans.append(sampler.plan)
        train(model, optimizer, iterator)
        plans.append(sampler.plan)
        hvd.shutdown()
        hvd.init()
    hvd.shutdown()
    return plans


@pytest.mark.ranks
def test_speeds_are_measured_anew_in_a_new_world() -> None:
    expected = [(4, 4, 4), (6, 5, 1), (4, 4, 4), (2, 5, 5)]
    assert run_ranks(3, train_through_a_new_world) == [expected] * 3


class Heard(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.messages.append(record.getMessage())


def repeat_orders() -> list[int]:
    """The number of warnings after each of some trainings; the last one repeats an order, then one more does."""
    hvd.init()
    model, heard = make_model(), Heard()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01))

    def epochs(*, shuffle: bool = True, numbers: tuple[int, ...] = (), evaluates: bool = False) -> None:
        data = make_data()
        sampler = hvd.data.BalancedSampler(data, BATCH, optimizer, shuffle=shuffle)
        loader = DataLoader(data, batch_sampler=sampler)
        for epoch in range(3):
            if numbers:
                sampler.set_epoch(numbers[epoch])
            if evaluates:
                assert len(list(loader)) == len(loader)
            else:
                train(model, optimizer, iter(loader))

    repeated_order._warned = False  # an earlier test of these ranks may have been warned
    logger.addHandler(heard)
    found = []
    try:
        kinds: list[dict[str, Any]] = [{"numbers": (0, 1, 2)}, {"shuffle": False}, {"evaluates": True}, {}, {}]
        for kind in kinds:
            epochs(**kind)
            found.append(len([line for line in heard.messages if "BalancedSampler: this epoch has the order" in line]))
    finally:
        logger.removeHandler(heard)
    hvd.shutdown()
    return found


@pytest.mark.ranks
def test_a_second_epoch_in_the_same_order_is_warned_of_once_by_the_first_rank() -> None:
    assert run_ranks(3, repeat_orders) == [[0, 0, 0, 1, 1], [0] * 5, [0] * 5]


def misuse() -> list[str]:
    hvd.init()
    data, said = make_data(), []

    def refuse(error: type[Exception], make: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            make()
        said.append(str(caught.value))

    model = make_model()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    refuse(TypeError, lambda: hvd.data.BalancedSampler(data, BATCH, plain))
    adasum = hvd.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), 0.1), op=hvd.Adasum)
    refuse(ValueError, lambda: hvd.data.BalancedSampler(data, BATCH, adasum))
    optimizer = hvd.DistributedOptimizer(plain)
    refuse(ValueError, lambda: hvd.data.BalancedSampler(data, 2, optimizer))
    refuse(ValueError, lambda: hvd.data.BalancedSampler(data, BATCH, optimizer, speeds=[1, 2]))
    old = hvd.data.BalancedSampler(data, BATCH, optimizer)
    sampler = hvd.data.BalancedSampler(data, BATCH, optimizer, every=1, seed=hvd.rank())
    refuse(ValueError, lambda: iter(old))
    for workers in (0, 1):
        loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)
        refuse(ValueError, lambda loader=loader: next(iter(loader)))  # type: ignore[misc]
    refuse(hvd.HorovodInternalError, lambda: train(model, optimizer, iter(DataLoader(data, batch_sampler=sampler))))
    hvd.shutdown()
    return said


@pytest.mark.ranks
def test_misuse_is_refused_with_its_cure() -> None:
    words = [
        "DistributedOptimizer",
        "Adasum",
        "at least 3",
        "one for each rank",
        "newer",
        "batch_sampler",
        "batch_sampler",
        "seed",
    ]
    for said in run_ranks(3, misuse):
        assert [word in message for word, message in zip(words, said, strict=True)] == [True] * len(words), said


class Event:
    """Stands for an event of torch.cuda, on a clock that the test moves."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_the_time_of_a_gpu_ends_with_its_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdkit.engine.planned.reducer import Statistics
    from hvdkit.engine.strategy import Strategy
    from hvdkit.torch.data.compute_clock import ComputeClock

    class OnDevice(Strategy):
        statistics = Statistics(waited_s=None)

    class Gradient:
        is_cpu, device = False, torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = ComputeClock(OnDevice())
    clock.gradient(Gradient())  # type: ignore[arg-type]
    assert clock.step() is None
    for moved_ms in (3.0, 2.0):
        Event.now_ms += moved_ms
        clock.gradient(Gradient())  # type: ignore[arg-type]
    Event.now_ms += 100.0  # other ranks come later
    seconds = clock.step()
    assert seconds is not None
    assert seconds() == pytest.approx(0.005)
    assert clock.step() is None, "without a gradient there is no end"
    Event.now_ms += 4.0
    clock.gradient(Gradient())  # type: ignore[arg-type]
    seconds = clock.step()
    assert seconds is not None
    assert seconds() == pytest.approx(0.004)


def test_a_row_of_weight_0_adds_nothing_whatever_its_gradient_is() -> None:
    product = weighted(torch.tensor([math.inf, math.nan, 1.0]), 0.0)
    assert product is not None
    assert product.tolist() == [0.0, 0.0, 0.0]
