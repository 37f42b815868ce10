"""Ranks that do not come to hvd.init() while others wait there: who they are is told, and the wait has an end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hvdrun_job import environment, hvdrun, lines
from rank_job import find_mpirun

from hvdkit.config import Config
from hvdkit.engine.startup import _describe, arriving
from hvdkit.launch.coming import ComingRanks, Wait
from hvdkit.launch.late import tell_of_wait
from hvdkit.launch.ranks import End, Ranks
from hvdkit.launcher_channel import OVER, READY, parse_coming, say_coming
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

IS_LATE = """
from hvdkit.engine import runtime as hvd
if rank == 1:
    time.sleep(2)
for _ in range(2):
    hvd.init()
    hvd.shutdown()
time.sleep(2)
"""

PART_IS_LATE = """
from hvdkit.engine import runtime as hvd
from mpi4py import MPI
if rank in (1, 2):
    from hvdkit.transport.part import Part
    if rank == 2:
        time.sleep(2)
    hvd.init(part=Part((2, 1)))
    hvd.shutdown()
elif rank == 3:
    time.sleep(3)
"""

WITHOUT_HVDRUN = """
import os, time
from hvdkit.engine import runtime as hvd
if os.environ['OMPI_COMM_WORLD_RANK'] == '1':
    time.sleep(40)
hvd.init(stall_check_s=1, stall_shutdown_s=2)
"""


def test_a_word_says_what_it_was_made_of() -> None:
    assert parse_coming(say_coming(60.0, 0.0)) == (60.0, 0.0, frozenset())
    assert parse_coming(say_coming(60.0, 0.0, [9, 2])) == (60.0, 0.0, frozenset({2, 9}))
    assert parse_coming(READY) is None and parse_coming(OVER) is None and parse_coming("coming:1:nan") is None


class Clock:
    """Time stands still until somebody sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_due_each_time_that_was_set_and_then_over() -> None:
    clock = Clock()
    coming = ComingRanks(clock)
    assert coming.left_s(range(4)) is None
    coming.hear(2, [say_coming(10, 25)])
    clock.now += 4
    coming.hear(0, [say_coming(10, 25)])
    assert coming.left_s(range(4)) == 6 and coming.take_due(range(4)) is None
    clock.now += 7
    assert coming.take_due(range(4)) == Wait(11, (0, 2), (1, 3), False)
    assert coming.left_s(range(4)) == 10  # again after as long
    clock.now += 14
    assert coming.take_due(range(4)) == Wait(25, (0, 2), (1, 3), True)


def test_a_wait_of_ranks_that_have_met_is_none_and_the_next_one_is_new() -> None:
    clock = Clock()
    coming = ComingRanks(clock)
    for _ in range(2):
        coming.hear(0, [say_coming(10, 0)])
        clock.now += 12
        assert coming.take_due([0, 1]) == Wait(12, (0,), (1,), False)
        coming.hear(1, [say_coming(10, 0), READY])
        coming.hear(0, [READY])
        assert coming.left_s([0, 1]) is None


def test_parts_of_the_job_wait_each_for_its_own_ranks() -> None:
    clock = Clock()
    coming = ComingRanks(clock)
    coming.hear(4, [say_coming(10, 0, [4, 1])])
    clock.now += 5
    coming.hear(0, [say_coming(10, 0, [3, 0])])
    assert coming.left_s(range(5)) == 5
    clock.now += 5
    assert coming.take_due(range(5)) == Wait(10, (4,), (1,), False, part=True)
    assert coming.left_s(range(5)) == 5 and coming.take_due(range(5)) is None
    clock.now += 5
    assert coming.take_due(range(5)) == Wait(10, (0,), (3,), False, part=True)
    coming.hear(1, [say_coming(10, 0, [4, 1]), READY])
    coming.hear(4, [READY])
    assert coming.left_s(range(5)) == 10


def test_nothing_is_told_where_that_is_switched_off_or_of_ranks_that_are_not_meant() -> None:
    clock = Clock()
    coming = ComingRanks(clock)
    coming.hear(0, [say_coming(0, 0)])
    clock.now += 1e6
    assert coming.take_due([0, 1]) is None
    coming.hear(5, [say_coming(1, 0)])
    clock.now += 1e6
    assert coming.take_due([1]) is None and not ComingRanks(clock).waits and coming.waits


def test_a_rank_that_has_ended_without_it_is_told_as_such() -> None:
    ranks = Ranks(3, hosts={0: "a", 1: "b", 2: "b"})
    ranks.end(1, End(0))
    told = "\n".join(tell_of_wait(Wait(60.2, (0, 2), (1,), False), ranks, {}))
    assert "waiting for 60 s: it was called by ranks 0 on a; 2 on b, and not by rank 1 on b." in told
    assert "rank 1 on b: has ended, with exit code 0" in told


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_hvdrun_names_ranks_that_never_come_with_what_they_do_and_ends_the_job() -> None:
    done = hvdrun(3, NEVER_COME, *SHORT)
    said = done.stderr.decode()
    assert done.returncode == 1 and "given up" in lines(done.stderr)[-1]
    first = said[said.index("hvd.init() has been waiting for 1 s") :].partition("hvdkit stacks")[0]
    assert "it was called by rank 0 on " in first and "not by ranks 1-2 on " in first
    assert "in looks_at_the_sky" in first and "stopped by a signal" in first


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_hvdrun_tells_of_a_rank_that_is_late_and_the_job_goes_on() -> None:
    done = hvdrun(2, IS_LATE, "--stall-check-s", "1")
    assert done.returncode == 0
    assert 1 <= done.stderr.count(b"hvd.init() has been waiting") <= 2
    assert b"called by rank 0 on " in done.stderr and b"time.sleep(2)" not in done.stdout


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_hvdrun_knows_who_is_missing_in_a_part_and_waits_for_nobody_else() -> None:
    done = hvdrun(4, PART_IS_LATE, "--stall-check-s", "1", "--stall-shutdown-s", "20")
    said = done.stderr.decode()
    assert done.returncode == 0
    assert 1 <= said.count("hvd.init() has been waiting") <= 2
    assert "called by rank 1 on " in said and "not by rank 2 on " in said and "All of them, which are its comm" in said


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_without_hvdrun_each_waiting_rank_tells_and_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_HVDRUN)
    argv = [*find_mpirun(), "-np", "2", sys.executable, str(script)]
    done = subprocess.run(argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert done.returncode
    assert b"hvd.init() has been waiting for 1 s: it was called by rank 0 (host " in done.stderr
    assert b"not by all of the 2 ranks" in done.stderr and b"called by rank 1" not in done.stderr
    assert b"given up after stall_shutdown_s=2 s" in done.stderr


def test_a_rank_of_a_part_says_who_is_to_come_and_what_the_others_must_do() -> None:
    said = _describe(World(4, 6, None, None, None, None, "here", "openmpi"), (4, 1), 61.0)
    assert "called by rank 4 (host here), and not by all of ranks 4, 1 of the job, which are its comm" in said
    assert "every other process of the job must start MPI" in said


def test_a_rank_that_has_come_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []
    world = World(0, 2, None, None, None, None, "here", "openmpi")
    with arriving(Config(stall_check_s=0.05, stall_shutdown_s=0.1), world, ended.append):
        pass
    time.sleep(0.3)
    assert not ended
    with arriving(Config(stall_check_s=0.05, stall_shutdown_s=0.1), world, ended.append):
        time.sleep(0.5)
    assert ended == [1]
