"""What can go wrong on a cluster, done to a real one: hvdrun ends in time, says what was wrong, and leaves no process.

That nothing is left is what the fixture `lab` looks at after each test, on all hosts.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from cluster.jobs import EVERYWHERE, HVDRUN, running, signal_agent, signal_rank
from cluster.lab import Lab, wait_until

pytestmark = pytest.mark.cluster

#: Until hvdrun knows of something that a process or the system says; and of a host that says nothing.
SOON_S, SILENT_S = 8, 20


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit", 3, "rank 2 on node3 failed with exit code 3"),
        ("abort", 7, "rank 2 on node3 failed with exit code 7"),
        ("raise", 1, "ValueError: no such batch"),
    ],
)
def test_a_rank_that_fails_gives_hvdrun_its_exit_code(lab: Lab, what: str, code: int, words: str) -> None:
    with running(lab, what) as job:
        ended, said, _ = job.end(SOON_S)
    assert ended == code, said
    assert words in said


def test_a_rank_that_is_killed_is_named(lab: Lab) -> None:
    with running(lab) as job:
        signal_rank(lab, job, 1, signal.SIGKILL)
        code, said, _ = job.end(SOON_S)
    assert code == 137, said
    assert "rank 1 on node2 was killed by SIGKILL" in said


def test_ranks_that_end_well_end_the_job_well(lab: Lab) -> None:
    with running(lab, "done") as job:
        code, said, _ = job.end(SOON_S)
    assert (code, said) == (0, "")


def test_a_launcher_that_is_killed_ends_the_job(lab: Lab) -> None:
    with running(lab) as job:
        assert lab.kill("node2", signal.SIGKILL, "bin/prted")
        code, said, _ = job.end(SOON_S)
    assert code not in (0, None), said
    assert "node2" in said


@pytest.mark.timeout(8, func_only=True)  # not ssh's ten seconds
def test_an_unknown_host_is_known_at_once(lab: Lab) -> None:
    done = lab.run("node1", [*HVDRUN, "-np", "2", "-H", "node1:1,nod2:1", "hostname"])
    assert done.returncode == 2
    assert "Unknown host: nod2" in done.stderr


def test_a_silent_host_is_given_up(lab: Lab) -> None:
    lab.cut("node3")
    done = lab.run("node1", [*HVDRUN, "-np", "3", "-H", EVERYWHERE, "hostname"], timeout=SILENT_S)
    assert done.returncode not in (0, None)
    assert "before rank" in done.stderr and "had started" in done.stderr


def test_a_host_where_ranks_do_not_come_up_is_given_up(lab: Lab) -> None:
    # ssh answers, and then nothing happens: a full process table, a dead file server
    command = [*HVDRUN, "--start-timeout", "3", "-np", "2", "-H", "node1:1,node2:1"]
    assert lab.kill("node2", signal.SIGSTOP, "sshd: ") or lab.kill("node2", signal.SIGSTOP, "sshd")
    done = lab.run("node1", [*command, "hostname"], timeout=SILENT_S)
    lab.kill("node2", signal.SIGCONT, "sshd")
    assert done.returncode == 2, done.stderr
    assert "had not started after 3 s" in done.stderr


def test_a_halted_host_ends_the_job(lab: Lab) -> None:
    with running(lab) as job:
        lab.halt("node3")
        code, said, _ = job.end(SOON_S)
    assert code not in (0, None)
    assert "rank 2 on node3 was lost" in said


def test_a_cut_link_ends_the_job_and_the_ranks_beyond_it(lab: Lab) -> None:
    with running(lab, "deaf") as job:
        lab.cut("node3")
        code, said, _ = job.end(SILENT_S)
        assert code not in (0, None)
        assert "rank 2 on node3 was lost" in said
        assert wait_until(lambda: not lab.strays(), SILENT_S), lab.strays()  # while it is still cut off


def test_a_stopped_rank_is_told_of_and_does_not_hinder_the_end(lab: Lab) -> None:
    with running(lab) as job:
        signal_rank(lab, job, 1, signal.SIGSTOP)
        assert job.process.stderr is not None
        assert "rank 1 on node2 was stopped by SIGSTOP; to continue it: kill -CONT" in job.process.stderr.readline()
        job.process.terminate()
        code, said, _ = job.end(SOON_S)
    assert code == 143, said


def test_a_stopped_agent_of_another_host_is_given_up_at_the_end(lab: Lab, tmp_path: Path) -> None:
    with running(lab, "until", str(tmp_path / "end")) as job:
        signal_agent(lab, job, 1, signal.SIGSTOP)
        (tmp_path / "end").touch()
        code, said, _ = job.end(120)
    assert code not in (0, None), said
    assert "the agent of rank 1 on node2 has not answered for 10 s" in said
    assert "hvdrun: rank 1 on node2 was lost: its agent has not answered for 35 s" in said


def test_an_agent_that_is_continued_as_hvdrun_says_ends_the_job_well(lab: Lab, tmp_path: Path) -> None:
    with running(lab, "until", str(tmp_path / "end")) as job:
        signal_agent(lab, job, 1, signal.SIGSTOP)
        (tmp_path / "end").touch()
        assert job.process.stderr is not None
        host, _, cure = job.process.stderr.readline().strip().rpartition("this continues it on ")[2].partition(": ")
        assert lab.run(host, ["sh", "-c", cure]).returncode == 0
        code, said, _ = job.end(SILENT_S)
    assert code == 0, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_hvdrun_ends_ranks_that_ignore_it(lab: Lab, number: signal.Signals, code: int) -> None:
    with running(lab, "deaf") as job:
        job.process.send_signal(number)
        ended, said, _ = job.end(SOON_S + 5 * (number == signal.SIGINT))  # after 5 s SIGTERM follows
    assert ended == code, said


@pytest.mark.parametrize("cut", [False, True], ids=["", "beyond a cut link"])
def test_a_killed_hvdrun_leaves_nothing(lab: Lab, cut: bool) -> None:
    with running(lab, "deaf") as job:
        if cut:
            lab.cut("node2")
        job.process.kill()
        assert wait_until(lambda: not lab.strays(), SILENT_S if cut else SOON_S), lab.strays()


def test_output_that_nobody_reads_for_a_while_does_not_look_like_a_lost_host(lab: Lab) -> None:
    with running(lab, "talk") as job:
        time.sleep(10)  # a host is given up after 6 to 8 seconds of silence
        code, said, _ = job.end(SILENT_S)
    assert code == 0, said
