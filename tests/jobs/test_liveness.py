"""A rank that ends is noticed by those who wait for it in shared memory, wherever they wait; a busy one is let be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pipe_ranks import PipeTransport, run_piped

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.errors import RankLostError
from hvdkit.transport import polling as waiting
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, as_buffer
from hvdkit.transport.polling import Backoff
from hvdkit.transport.shared.transport import SharedMemoryTransport


class NoGradients:
    """Gradients that are all zero."""

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        memory.array[:] = 0
        return Filled(frozenset())

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        pass

    def on_plan(self, plan: Plan) -> None:
        pass


def open_shared(group: PipeTransport, directory: str) -> SharedMemoryTransport:
    return SharedMemoryTransport(group, group, host="here", directory=directory)


def wait_for_a_bucket(transport: SharedMemoryTransport, end: Callable[[], None]) -> None:
    buckets = transport.open_buckets([BucketSpec("float32", 1000)] * 2)
    end()
    buckets.start(0)
    buckets.wait(0)


def wait_for_a_reduce_scatter(transport: SharedMemoryTransport, end: Callable[[], None]) -> None:
    buckets = transport.open_buckets([BucketSpec("float32", 1000)])
    end()
    buckets.reduce_scatter(0)
    buckets.wait(0)


def wait_for_an_all_gather(transport: SharedMemoryTransport, end: Callable[[], None]) -> None:
    buckets = transport.open_buckets([BucketSpec("float32", 1000)])
    buckets.reduce_scatter(0)
    buckets.wait(0)
    end()
    buckets.all_gather(0)
    buckets.wait(0)


def wait_in_allreduce(transport: SharedMemoryTransport, end: Callable[[], None]) -> None:
    array = np.zeros(3_000_000, np.float32)
    transport.allreduce(as_buffer(array))
    end()
    transport.allreduce(as_buffer(array))


def _reduce_gradients(transport: SharedMemoryTransport, end: Callable[[], None], threaded: bool) -> None:
    moving = BucketReducer(
        Context(transport),
        [TensorSpec("fc.weight", 100, "float32"), TensorSpec("fc.bias", 100, "float32")],
        NoGradients(),
        options=ReduceOptions(),
        settings=PlanSettings(4096, 2, progress="thread" if threaded else "inline"),
        statistics=Statistics(),
    )
    moving.finish()
    end()
    moving.arrived(0)
    time.sleep(0.3)
    moving.finish()


def wait_for_gradients(transport: SharedMemoryTransport, end: Callable[[], None]) -> None:
    _reduce_gradients(transport, end, threaded=False)


def wait_for_gradients_in_a_thread(transport: SharedMemoryTransport, end: Callable[[], None]) -> None:
    _reduce_gradients(transport, end, threaded=True)


Wait = Callable[[SharedMemoryTransport, Callable[[], None]], None]
WAITS = [
    pytest.param(wait_for_a_bucket, marks=pytest.mark.slow),
    pytest.param(wait_for_a_reduce_scatter, marks=pytest.mark.slow),
    pytest.param(wait_for_an_all_gather, marks=pytest.mark.slow),
    pytest.param(wait_in_allreduce, marks=pytest.mark.slow),
    wait_for_gradients,
    pytest.param(wait_for_gradients_in_a_thread, marks=pytest.mark.slow),
]


def lose_rank_one(group: PipeTransport, directory: str, wait: Wait, killed: bool) -> str:
    """The error of a rank that waits for rank 1."""
    transport = open_shared(group, directory)

    def end() -> None:
        group.barrier()
        if group.rank != 1:
            return
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        transport.leave()
        raise EndOfScriptError

    message = ""
    try:
        wait(transport, end)
    except RankLostError as error:
        message = str(error)
    except EndOfScriptError:
        message = "gone"
    if not killed:
        group.barrier()  # rank 1's process is there until the others have noticed
    return message


class EndOfScriptError(Exception):
    """Rank 1 needs no more steps."""


@pytest.mark.ranks
@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank_is_noticed_by_all_others(wait: Wait, tmp_path: Path) -> None:
    first, dead, third = run_piped(3, lose_rank_one, str(tmp_path), wait, True)
    assert dead is None
    for message in (first, third):
        assert "Rank 1 on host here has died: it raised an error, was killed, crashed" in message
        assert ("fc.weight" in message and "fc.bias" in message) == ("gradients" in wait.__name__)


@pytest.mark.ranks
@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_that_has_left_is_told_from_a_dead_one(wait: Wait, tmp_path: Path) -> None:
    answers = run_piped(3, lose_rank_one, str(tmp_path), wait, False)
    assert answers[1] == "gone"
    for rank in (0, 2):
        assert "Rank 1 on host here has shut hvdkit down (or reached the end of its script)" in answers[rank]
        assert f"while rank {rank} still waits for it" in answers[rank]


def look_when_two_have_died(group: PipeTransport, directory: str) -> str:
    """Rank 1 is killed, rank 0 is told and ends for that, and rank 2 looks when both are gone."""
    transport = open_shared(group, directory)
    said = Path(directory) / "told"
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        with pytest.raises(RankLostError, match="Rank 1"):
            _look_until_told(transport)
        said.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not said.exists():
        time.sleep(0.01)
    time.sleep(0.2)
    with pytest.raises(RankLostError) as told:
        _look_until_told(transport)
    return str(told.value)


def _look_until_told(transport: SharedMemoryTransport) -> None:
    while True:
        transport.check()
        time.sleep(0.01)


@pytest.mark.ranks
def test_of_two_dead_ranks_the_one_that_died_first_is_named(tmp_path: Path) -> None:
    assert "Rank 1 on host here has died" in run_piped(3, look_when_two_have_died, str(tmp_path))[2]


def fork_while_others_wait(group: PipeTransport, directory: str) -> float:
    transport = open_shared(group, directory)
    buckets = transport.open_buckets([BucketSpec("float32", 1)])
    buckets.memory[0].array[:] = group.rank
    if group.rank == 1:
        for _ in range(3):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.05,))
        worker.start()
        worker.join()
        time.sleep(0.5)  # five times as long as between two looks
    buckets.start(0)
    buckets.wait(0)
    total = float(buckets.memory[0].array.sum())
    buckets.close()
    transport.close()
    return total


@pytest.mark.ranks
def test_children_of_a_rank_that_end_are_no_dead_ranks(tmp_path: Path) -> None:
    assert run_piped(3, fork_while_others_wait, str(tmp_path)) == [3.0] * 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only sleeping moves on, and what has been done to it."""
    seen = SimpleNamespace(now=100.0, yields=0, sleeps=0)

    def sleep(seconds: float) -> None:
        seen.now += seconds
        seen.sleeps += 1

    def give_way() -> None:
        seen.yields += 1

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: seen.now, sleep=sleep))
    monkeypatch.setattr(waiting, "os", SimpleNamespace(sched_yield=give_way))
    return seen


def test_a_wait_yields_at_first_and_sleeps_later(clock: SimpleNamespace) -> None:
    wait = Backoff(lambda: None)
    for _ in range(3000):
        wait.pause()
    assert (clock.yields, clock.sleeps) == (3000, 0)
    for _ in range(50):
        wait.pause()
    assert (clock.yields, clock.sleeps) == (3000, 50)


def test_a_wait_looks_after_the_peers_every_tenth_of_a_second(clock: SimpleNamespace) -> None:
    looked: list[float] = []
    wait = Backoff(lambda: looked.append(clock.now))
    while clock.now < 100.55:
        wait.pause()
    assert [round(at, 2) for at in looked] == [100.1, 100.2, 100.3, 100.4, 100.5]


def test_what_the_look_raises_ends_the_wait(clock: SimpleNamespace) -> None:
    def check() -> None:
        raise RankLostError("Rank 1 has died.")

    wait = Backoff(check)
    with pytest.raises(RankLostError, match="Rank 1"):
        for _ in range(10_000):
            wait.pause()
