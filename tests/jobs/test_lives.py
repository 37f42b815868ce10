"""Jobs that are lost are started again by hvdrun, and come to what they would have: real processes on this host."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from elastic_job import Job, started
from elastic_world_script import reference
from hvdrun_job import ROOT, descendants

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.group("elastic jobs")]

DIGITS = ROOT / "examples" / "pytorch_resumable_digits.py"
SCRIPT = ROOT / "tests" / "support" / "elastic_world_script.py"


def shared_memory(pids: set[str]) -> list[str]:
    """What these processes have left in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("hvdkit-") and pids & set(name.split("-"))]


def training(steps: int) -> tuple[str, ...]:
    return str(SCRIPT), str(steps), "0.02", "5"


def kept(folder: Path) -> list[str]:
    return ["--elastic-checkpoints", str(folder), "--elastic-save-s", "0.2"]


def has_saved(folder: Path) -> bool:
    return len(list(folder.glob("checkpoint-*"))) > 1  # hvdrun has heard of the first one then


def launcher_of(job: Job) -> int:
    """The process that hvdrun has started to start the ranks."""
    for pid in descendants(job.process.pid):
        if b"prterun" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            return pid
    raise AssertionError(job.output)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_job_that_has_lost_a_rank_is_started_again_and_comes_to_the_same(victim: int, tmp_path: Path) -> None:
    options = ("-np", "3", "--elastic-restarts", "--output-filename", str(tmp_path / "logs"), *kept(tmp_path / "kept"))
    with started(*options, command=training(150)) as job:
        job.wait_for(lambda: len(job.pids) == 3 and has_saved(tmp_path / "kept"))
        job.kill(victim)
        output = job.end()
    assert job.process.returncode == 0, output
    assert job.result()["summary"] == pytest.approx(reference(150), abs=1e-12)
    assert job.result()["sizes"] == [3, 3] and job.result()["alike"]
    assert f"rank {victim} on" in output and "starting again with 3 ranks, from the last checkpoint (start 2)" in output
    assert output.count("Traceback") == 0, output
    assert (tmp_path / "logs" / "rank.0.log").read_text().count("pid ") == 2
    assert not shared_memory(set(re.findall(r"\[\d+\] pid (\d+)", output)))


@pytest.mark.slow
def test_a_job_whose_ranks_outlive_each_other_is_started_again_when_it_is_lost_as_a_whole(tmp_path: Path) -> None:
    with started("-np", "2", "--min-np", "1", *kept(tmp_path / "kept"), command=training(150)) as job:
        job.wait_for(lambda: len(job.pids) == 2 and has_saved(tmp_path / "kept"))
        os.kill(launcher_of(job), signal.SIGKILL)
        output = job.end()
    assert job.process.returncode == 0, output
    assert job.result()["summary"] == pytest.approx(reference(150), abs=1e-12)
    assert "starting again with 2 ranks, from the last checkpoint" in output


def test_an_error_of_the_script_is_not_met_again(tmp_path: Path) -> None:
    code = "import hvdkit.torch as hvd; hvd.init(); 1 / 0"
    with started("-np", "2", "--elastic-restarts", *kept(tmp_path), command=("-c", code)) as job:
        output = job.end()
    assert job.process.returncode == 1 and "ZeroDivisionError" in output
    assert "starting again" not in output


@pytest.mark.slow
def test_a_rank_that_is_killed_each_time_before_anything_is_saved_ends_the_job() -> None:
    code = "import os, hvdkit.torch as hvd; hvd.init(); hvd.rank() or os.kill(os.getpid(), 11); hvd.barrier()"
    with started("-np", "2", "--elastic-restarts", command=("-c", code)) as job:
        output = job.end()
    assert job.process.returncode == 139, output
    assert output.count("was killed by SIGSEGV") == 3
    assert "from the beginning: nothing has been saved (start 3, 2 in a row ended" in output
    assert "3 attempts in a row ended before a checkpoint was saved" in output


@pytest.mark.slow
def test_it_is_started_again_as_often_as_it_may_be(tmp_path: Path) -> None:
    options = ("-np", "2", "--elastic-restarts", "--reset-limit", "1", *kept(tmp_path))
    with started(*options, command=training(9999)) as job:
        job.wait_for(lambda: len(job.pids) == 2 and has_saved(tmp_path))
        first = dict(job.pids)
        job.kill(1)
        job.wait_for(lambda: all(job.pids[rank] != first[rank] for rank in first))
        job.kill(0)
        output = job.end()
    assert job.process.returncode == 137, output
    assert "it was restarted 1 time, the limit (--reset-limit)" in output


@pytest.mark.slow
def test_sigterm_has_the_commit_saved_and_the_same_command_goes_on(tmp_path: Path) -> None:
    options = ("-np", "2", "--elastic-restarts", "--elastic-checkpoints", str(tmp_path / "kept"))
    with started(*options, command=training(150)) as job:
        job.wait_for(lambda: len(job.pids) == 2 and job.committed(20))
        job.process.terminate()
        output = job.end()
    assert job.process.returncode == 75, output
    assert "starting again" not in output
    with started(*options, command=training(150)) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert not job.committed(5) or int(re.findall(r"committed (\d+)", output)[0]) > 20
    assert job.result()["summary"] == pytest.approx(reference(150), abs=1e-12)


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_long_is_killed_and_the_job_started_again(tmp_path: Path) -> None:
    options = ("-np", "2", "--elastic-restarts", "--elastic-hang-timeout-s", "1", *kept(tmp_path / "kept"))
    with started(*options, command=training(150)) as job:
        job.wait_for(lambda: len(job.pids) == 2 and has_saved(tmp_path / "kept"))
        os.kill(job.pids[1], signal.SIGSTOP)
        output = job.end()
    assert job.process.returncode == 0, output
    assert job.result()["summary"] == pytest.approx(reference(150), abs=1e-12)
    assert "it has been stopped by SIGSTOP for 1 s" in output and "starting again with 2 ranks" in output


@pytest.mark.slow
def test_checkpoints_of_the_script_will_do(tmp_path: Path) -> None:
    options = ("--checkpoints", "checkpoints", "--epochs", "30", "--every", "0.2", "--min-accuracy", "0.9")
    with started("--verbose", "-np", "2", "--elastic-restarts", command=(str(DIGITS), *options), cwd=tmp_path) as job:
        job.wait_for(lambda: has_saved(tmp_path / "checkpoints"))
        job.kill(1)
        output = job.end()
    assert job.process.returncode == 0, output
    assert "starting again with 2 ranks, from the last checkpoint" in output and "continuing from" in output
    assert output.count("epoch 1 ") <= 1


def hosts_script(folder: Path, *lines: str) -> str:
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o700)
    (folder / "hosts").write_text("\n".join(lines))
    return str(script)


@pytest.mark.slow
def test_a_job_takes_the_slots_that_a_script_comes_to_know(tmp_path: Path) -> None:
    discovery = ("--host-discovery-script", hosts_script(tmp_path, "localhost:2"), "--max-np", "3")
    with started("--elastic-restarts", *discovery, *kept(tmp_path / "kept"), command=training(200)) as job:
        job.wait_for(lambda: len(job.pids) == 2 and has_saved(tmp_path / "kept"))
        (tmp_path / "hosts").write_text("localhost:2\n127.0.0.1:2\n")
        output = job.end()
    assert job.process.returncode == 0, output
    assert job.result()["sizes"] == [2, 3]
    assert job.result()["summary"] == pytest.approx(reference(200), abs=1e-12)
    assert "the hosts have slots for 3 ranks" in output and "starting again with 3 ranks" in output


def test_a_job_waits_for_its_slots_and_not_for_ever(tmp_path: Path) -> None:
    discovery = ("--host-discovery-script", hosts_script(tmp_path, "localhost:1"), "--elastic-timeout", "1")
    with started("-np", "2", *discovery, command=("-c", "print('ran')")) as job:
        output = job.end()
    assert job.process.returncode == 2, output
    assert (
        "there is 1 slot, and 2 are needed (-np): waiting" in output and "did not report 2 slots within 1 s" in output
    )
    assert "ran" not in output


@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["with notes", "quiet"])
def test_a_quiet_job_does_not_say_that_it_waits_for_slots(quiet: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/asked ] && echo localhost:2 || echo localhost:1\ntouch {tmp_path}/asked\n"
    )
    script.chmod(0o755)
    options = ("-np", "2", *quiet, "--host-discovery-script", str(script))
    with started(*options, command=("-c", "print('ran')")) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    notes = [line for line in output.splitlines() if line not in ("[0] ran", "[1] ran")]
    if quiet:
        assert notes == []
    else:
        assert notes[0].startswith("hvdrun: there is 1 slot, and 2 are needed (-np): waiting up to ")


@pytest.mark.slow
def test_too_few_slots_are_left_and_something_is_saved(tmp_path: Path) -> None:
    discovery = ("--host-discovery-script", hosts_script(tmp_path, "localhost:2"), "--elastic-timeout", "1")
    options = ("--elastic-restarts", "-np", "2", "--min-np", "2", *discovery, *kept(tmp_path / "kept"))
    with started(*options, command=training(9999)) as job:
        job.wait_for(lambda: len(job.pids) == 2 and has_saved(tmp_path / "kept"))
        (tmp_path / "hosts").write_text("localhost:1")
        job.kill(0)
        output = job.end()
    assert job.process.returncode == 75, output
    assert "there is 1 slot, and 2 are needed (--min-np): waiting" in output
    assert "fewer slots than the 2 that are needed (--min-np): ended with exit code 75" in output
