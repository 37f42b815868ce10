"""Ranks that do not come to hvd.init() while others wait there: who they are is told, and the wait has an end."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn
from unittest.mock import MagicMock

import pytest
from hvdrun_job import command, environment, hvdrun, lines
from rank_job import find_mpirun

from hvdkit.config import Config
from hvdkit.engine import startup
from hvdkit.engine.startup import _describe, arriving, open_world
from hvdkit.errors import SharedMemoryError
from hvdkit.launch.introspect.init_watchdog import InitWait, InitWaits, describe_wait
from hvdkit.launch.state.ranks import End, Phase, Ranks
from hvdkit.launcher_channel import READY, TRAINED, announce_init, parse_init_call
from hvdkit.transport.select import Connection
from hvdkit.world import World

SHORT = ("--stall-check-s", "1", "--stall-shutdown-s", "2.5")

NEVER_COME = """
from hvdkit.engine import runtime as hvd
def looks_at_the_sky():
    time.sleep(40)
if rank == 1:
    looks_at_the_sky()
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
hvd.init()
"""

#: In place of WAIT in the scripts below: rank LATE waits until hvdrun has reported that it is missing.
WAIT_FOR_REPORT = """
while rank == LATE and b"hvd.init() has been waiting" not in open(REPORTS, "rb").read():
    time.sleep(0.05)
"""

IS_LATE = """
from hvdkit.engine import runtime as hvd
WAIT
for _ in range(2):
    hvd.init()
    hvd.shutdown()
"""

PART_IS_LATE = """
from hvdkit.engine import runtime as hvd
from mpi4py import MPI
WAIT
if rank in (1, 2):
    from hvdkit.transport.rank_subset import RankSubset
    hvd.init(subset=RankSubset((2, 1)))
    hvd.shutdown()
"""

WITHOUT_HVDRUN = """
import os, time
from hvdkit.engine import runtime as hvd
if os.environ['OMPI_COMM_WORLD_RANK'] == '1':
    time.sleep(40)
hvd.init(stall_check_s=1, stall_shutdown_s=2)
"""


def test_a_word_says_what_it_was_made_of() -> None:
    assert parse_init_call(announce_init(60.0, 0.0)) == (60.0, 0.0, frozenset())
    assert parse_init_call(announce_init(60.0, 0.0, [9, 2])) == (60.0, 0.0, frozenset({2, 9}))
    assert parse_init_call(READY) is None and parse_init_call(TRAINED) is None and parse_init_call("init:1:nan") is None


class Clock:
    """Time stands still until somebody sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def waits_of(size: int) -> tuple[Clock, Ranks, InitWaits]:
    clock = Clock()
    ranks = Ranks(size, clock)
    return clock, ranks, InitWaits(ranks)


def test_a_wait_is_due_each_time_that_was_set_and_then_over() -> None:
    clock, ranks, waits = waits_of(4)
    assert waits.left_s() is None
    ranks.hear(2, [announce_init(10, 25)])
    clock.now += 4
    ranks.hear(0, [announce_init(10, 25)])
    assert waits.left_s() == 6 and waits.take_due() is None
    clock.now += 7
    assert waits.take_due() == InitWait(11, (0, 2), (1, 3), False)
    assert waits.left_s() == 10  # again after as long
    clock.now += 14
    assert waits.take_due() == InitWait(25, (0, 2), (1, 3), True)


def test_a_wait_of_ranks_that_have_met_is_none_and_the_next_one_is_new() -> None:
    clock, ranks, waits = waits_of(2)
    for _ in range(2):
        ranks.hear(0, [announce_init(10, 0)])
        clock.now += 12
        assert waits.take_due() == InitWait(12, (0,), (1,), False)
        ranks.hear(1, [announce_init(10, 0), READY])
        ranks.hear(0, [READY])
        assert waits.left_s() is None


def test_parts_of_the_job_wait_each_for_its_own_ranks() -> None:
    clock, ranks, waits = waits_of(5)
    ranks.hear(4, [announce_init(10, 0, [4, 1])])
    clock.now += 5
    ranks.hear(0, [announce_init(10, 0, [3, 0])])
    assert waits.left_s() == 5
    clock.now += 5
    assert waits.take_due() == InitWait(10, (4,), (1,), False, is_subset=True)
    assert waits.left_s() == 5 and waits.take_due() is None
    clock.now += 5
    assert waits.take_due() == InitWait(10, (0,), (3,), False, is_subset=True)
    ranks.hear(1, [announce_init(10, 0, [4, 1]), READY])
    ranks.hear(4, [READY])
    assert waits.left_s() == 10


def test_nothing_is_reported_where_that_is_switched_off_or_of_ranks_that_are_not_meant() -> None:
    clock, ranks, waits = waits_of(2)
    ranks.hear(0, [announce_init(0, 0)])
    clock.now += 1e6
    assert waits.left_s() is None and waits.take_due() is None
    ranks.register(5, "a", replaces=True)
    ranks.admit(5)
    ranks.hear(5, [announce_init(1, 0)])  # it meets others once it has joined them
    clock.now += 1e6
    assert ranks.states[5].init_call is not None and waits.take_due() is None
    ranks.continue_without(5)
    assert ranks.states[5].init_call is None and ranks.states[5].phase is Phase.LEFT_BEHIND


def test_a_rank_that_has_ended_without_it_is_reported_as_such() -> None:
    ranks = Ranks(3)
    for rank, host in enumerate("abb"):
        ranks.register(rank, host)
    ranks.end(1, End(0))
    report = "\n".join(describe_wait(InitWait(60.2, (0, 2), (1,), False), ranks, {}))
    assert "waiting for 60 s: it was called by ranks 0 on a; 2 on b, and not by rank 1 on b." in report
    assert "rank 1 on b: has ended, with exit code 0" in report


def test_a_wait_for_a_rank_that_has_ended_without_it_is_over_soon() -> None:
    clock, ranks, waits = waits_of(3)
    for rank, host in enumerate("abb"):
        ranks.register(rank, host)
    ranks.hear(0, [announce_init(60, 0)])
    assert waits.left_s() == 60
    ranks.end(1, End(0))
    assert waits.left_s() == 5 and waits.take_due() is None
    clock.now += 6
    assert waits.take_due() == InitWait(6, (0,), (1, 2), True, ended=(1,))


@pytest.mark.parametrize("fixed", [True, False])
def test_a_wait_goes_on_if_the_ended_rank_had_joined_or_the_world_may_shrink(fixed: bool) -> None:
    clock, ranks, _ = waits_of(2)
    waits = InitWaits(ranks, fixed=fixed)
    for rank in range(2):
        ranks.register(rank, "a")
    if fixed:  # what rank 0 reports of the same world may come later
        ranks.hear(1, [announce_init(60, 0), READY])
    ranks.hear(0, [announce_init(60, 0)])
    ranks.end(1, End(0))
    assert waits.left_s() == 60
    clock.now += 60
    assert waits.take_due() == InitWait(60, (0,), (1,), False)


def run_with_late_rank(late: int, folder: Path, ranks: int, script: str, *options: str) -> tuple[int, str]:
    """Run a job of which one rank waits for hvdrun's report; returns the exit code and what hvdrun and ranks said."""
    reports = folder / "reports"
    wait = WAIT_FOR_REPORT.replace("LATE", str(late)).replace("REPORTS", repr(str(reports)))
    with reports.open("wb") as stderr:
        argv = command(ranks, script.replace("WAIT\n", wait), *options)
        done = subprocess.run(argv, env=environment(), stdin=subprocess.DEVNULL, stderr=stderr, timeout=100)
    return done.returncode, reports.read_text()


@pytest.mark.ranks
def test_hvdrun_names_ranks_that_never_come_with_what_they_do_and_ends_the_job() -> None:
    done = hvdrun(3, NEVER_COME, *SHORT)
    said = done.stderr.decode()
    assert done.returncode == 1 and "given up" in lines(done.stderr)[-1]
    first = said[said.index("hvd.init() has been waiting for ") :].partition("hvdkit stacks")[0]
    assert "it was called by rank 0 on " in first and "not by ranks 1-2 on " in first
    assert "in looks_at_the_sky" in first and "stopped by a signal" in first


@pytest.mark.ranks
def test_hvdrun_tells_of_a_rank_that_is_late_and_the_job_goes_on(tmp_path: Path) -> None:
    code, said = run_with_late_rank(1, tmp_path, 2, IS_LATE, "--stall-check-s", "1")
    assert code == 0
    assert "called by rank 0 on " in said and "not by rank 1 on " in said and "in <module>" in said


@pytest.mark.ranks
def test_hvdrun_knows_who_is_missing_in_a_part_and_waits_for_nobody_else(tmp_path: Path) -> None:
    code, said = run_with_late_rank(2, tmp_path, 4, PART_IS_LATE, "--stall-check-s", "1")
    assert code == 0
    assert "called by rank 1 on " in said and "not by rank 2 on " in said and "All ranks of its comm" in said


@pytest.mark.ranks
def test_without_hvdrun_each_waiting_rank_tells_and_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_HVDRUN)
    argv = [*find_mpirun(), "-np", "2", sys.executable, str(script)]
    done = subprocess.run(argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert done.returncode
    assert b"hvd.init() on rank 0 (host " in done.stderr
    assert re.search(rb"waiting for other ranks for \d+ s", done.stderr)
    assert b"All 2 ranks that " in done.stderr and b"hvd.init() on rank 1" not in done.stderr
    assert b"timed out after stall_shutdown_s=2 s" in done.stderr


def test_a_rank_of_a_part_says_who_is_to_come_and_what_the_others_must_do() -> None:
    said = _describe(World(4, 6, None, None, None, None, "here", "openmpi"), (4, 1), 61.0)
    assert "hvd.init() on rank 4 (host here) has been waiting" in said and "The ranks 4, 1 of the job" in said
    assert "every other process of the job must start MPI" in said


def test_a_rank_that_has_come_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []
    gave_up = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        gave_up.set()

    world = World(0, 2, None, None, None, None, "here", "openmpi")
    with arriving(Config(stall_check_s=1000.0, stall_shutdown_s=1000.0), world, end):
        watch = next(thread for thread in threading.enumerate() if thread.name == "hvdkit-init")
    watch.join()
    assert not ended and not caplog.records
    with arriving(Config(stall_check_s=0.05, stall_shutdown_s=0.1), world, end):
        gave_up.wait()
    assert ended == [1]


def test_a_rank_without_memory_for_its_transport_leaves_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = MagicMock()
    world = World(0, 2, 0, 2, 0, 1, "here", "torchrun")
    monkeypatch.setattr(startup, "connect", lambda config, subset: Connection(world, base))

    def fail(config: Config, connection: Connection) -> NoReturn:
        raise SharedMemoryError("/dev/shm is full")

    with pytest.raises(SharedMemoryError, match="is full"):
        open_world(Config(), opener=fail)
    base.close.assert_called_once_with(idle=False)
