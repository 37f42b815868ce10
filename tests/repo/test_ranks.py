"""The tests' own tool: failures and hangs of ranks are shown, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import RanksFailedError, run_ranks

from hvdkit.transport.api import Transport
from hvdkit.world import read_world

pytestmark = pytest.mark.ranks


def describe(factor: int, add: int = 0) -> tuple[int, int, int]:
    world = read_world()
    return os.getpid(), world.size, factor * world.rank + add


def fail_on_rank_one(transport: Transport) -> None:
    print("before the failure")
    if transport.rank == 1:
        raise ValueError("rank one had enough")
    transport.barrier()


def hang_on_rank_one() -> int:
    if read_world().rank == 1:
        time.sleep(600)
    return 7


def die_on_rank_one(transport: Transport) -> None:
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.barrier()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_answer_in_order_and_are_used_again() -> None:
    first = run_ranks(2, describe, 10, add=1)
    second = run_ranks(2, describe, 10)
    assert [answer[1:] for answer in first] == [(2, 1), (2, 11)]
    assert [answer[0] for answer in first] == [answer[0] for answer in second]


def test_fresh_ranks_are_others() -> None:
    assert run_ranks(2, describe, 1)[0][0] != run_ranks(2, describe, 1, fresh=True)[0][0]


def test_variables_reach_the_ranks() -> None:
    assert run_ranks(2, variable, "HVDKIT_TEST_WORD", env={"HVDKIT_TEST_WORD": "a b"}) == ["a b", "a b"]


def test_a_rank_that_raises_is_shown_and_ends_the_others() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, fail_on_rank_one, transport="mpi", grace=0.5)
    assert set(caught.value.tracebacks) == {1}
    assert "ValueError: rank one had enough" in str(caught.value)
    assert set(caught.value.silent) == {0, 2} and "barrier" in caught.value.silent[0]
    assert "before the failure" in caught.value.output
    assert len(run_ranks(3, describe, 1)) == 3


def test_a_rank_that_hangs_shows_its_stack() -> None:
    with pytest.raises(RanksFailedError, match="hang_on_rank_one") as caught:
        run_ranks(2, hang_on_rank_one, timeout=1)
    assert caught.value.results == {0: 7} and set(caught.value.silent) == {1}


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, die_on_rank_one, transport="mpi", fresh=True)
    assert 1 in caught.value.ended and caught.value.status not in (0, None)


_ENDED_IN_A_TEST = """
import os, pickle, sys, time
from rank_job import Job
job = Job(2, {})
for connection in job.connections.values():
    connection.send((sys.path, pickle.dumps(("", None, time.sleep, (600,), {}))))
print(*job._pids.values(), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_the_tests_that_started_them() -> None:
    tests = Path(__file__).parents[1] / "support"
    paths = os.pathsep.join([str(tests), str(tests.parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", _ENDED_IN_A_TEST],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        pids = [int(word) for word in started.stdout.readline().split()]
        assert len(pids) == 2
        started.kill()
    until = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, f"ranks {left} are left"
        time.sleep(0.05)
