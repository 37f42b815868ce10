"""Ranks and whole hosts are lost, and the others go on: three hosts with a network between them."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster.jobs import EVERYWHERE, Job, signal_agent, signal_rank
from cluster.lab import Lab, environment
from elastic_world_script import reference

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "support" / "elastic_world_script.py"


@contextmanager
def training(
    lab: Lab,
    steps: int,
    *options: str,
    python: str = sys.executable,
    hosts: str = EVERYWHERE,
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[Job, list[str]]]:
    """The script at work on all hosts, once something has been committed; with what it has said until then."""
    where = () if "--host-discovery-script" in options else ("-H", hosts)
    hvdrun = (python, "-m", "hvdkit.launch", "--elastic", *options, *where)
    env = environment(PATH="/usr/bin:/bin") if python != sys.executable else environment(**variables or {})
    process = lab.start("node1", [*hvdrun, python, str(SCRIPT), str(steps), "0.02", "5"], env=env)
    job, said = Job(process, {}), list[str]()
    try:
        read_until(job, said, "committed 10", 3)
        yield job, said
    finally:
        process.kill()
        process.communicate()


def read_until(job: Job, said: list[str], what: str, ranks: int) -> None:
    """Read on until so many ranks have begun, and then something is said."""
    assert job.process.stdout is not None
    job.ranks.clear()
    while len(job.ranks) < ranks or what not in said[-1]:
        said.append(job.process.stdout.readline())
        assert said[-1], (said, job.process.communicate())
        if found := re.match(r"\[(\d+) (\S+)\] pid (\d+)", said[-1]):
            job.ranks[int(found[1])] = found[2], int(found[3])


def outcome(job: Job, timeout: float) -> dict[str, object]:
    output, errors = job.process.communicate(timeout=timeout)
    assert job.process.returncode == 0, errors
    found: dict[str, object] = json.loads(next(line for line in output.splitlines() if '"summary"' in line)[9:])
    return {**found, "said": errors}


def test_a_rank_of_another_host_is_outlived(lab: Lab) -> None:
    with training(lab, 200, "-np", "3", "--min-np", "2") as (job, _):
        signal_rank(lab, job, 1, signal.SIGKILL)
        result = outcome(job, 60)
    assert result["sizes"] == [3, 2] and result["alike"]
    assert result["summary"] == pytest.approx(reference(200), abs=1e-12)


def test_a_rank_comes_in_place_of_one_on_another_host(lab: Lab) -> None:
    with training(lab, 250, "-np", "3", "--min-np", "2", hosts="node1:1,node2:2") as (job, _):
        signal_rank(lab, job, 1, signal.SIGKILL)
        result = outcome(job, 60)
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(reference(250), abs=1e-12)
    assert "rank 3 starts on node2" in str(result["said"])


@pytest.mark.parametrize("back", [False, True], ids=["for-good", "for-a-while"])
def test_a_host_that_is_cut_off_is_outlived(back: bool, lab: Lab) -> None:
    steps = 600 if back else 250
    with training(lab, steps, "-np", "3", "--min-np", "2") as (job, said):
        lab.cut("node3")
        if back:
            read_until_line(job, said, "committed 200")  # the others have gone on
            lab.mend("node3")
        result = outcome(job, 60)
    assert result["sizes"] == [3, 2] and result["alike"]
    assert result["summary"] == pytest.approx(reference(steps), abs=1e-12)
    assert "rank 2 on node3 was lost" in str(result["said"])


def test_a_stopped_agent_of_another_host_is_outlived(lab: Lab) -> None:
    with training(lab, 1500, "-np", "3", "--min-np", "2", "--elastic-hang-timeout-s", "5") as (job, _):
        signal_agent(lab, job, 2, signal.SIGSTOP)
        result = outcome(job, 150)
    assert result["sizes"] == [3, 2] and result["alike"], result["said"]
    assert result["summary"] == pytest.approx(reference(1500), abs=1e-12)
    assert "rank 2 on node3 was lost: its agent has not answered for 15 s" in str(result["said"])


def test_mpirun_does_not_end_the_job_as_it_hears_nothing_of_a_host(lab: Lab) -> None:
    impatient = {"time": "2", "intvl": "1", "probes": "2"}
    variables = {f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in impatient.items()}
    with training(lab, 600, "-np", "3", "--min-np", "2", variables=variables) as (job, _):
        lab.cut("node3")  # it would notice after 4 s: after 8 minutes, as it is otherwise
        result = outcome(job, 60)
    assert result["sizes"] == [3, 2] and result["alike"], result["said"]


def test_ranks_of_a_lost_host_are_replaced_where_slots_are_free(lab: Lab) -> None:
    with training(lab, 400, "-np", "3", "--min-np", "1", hosts="node1:1,node3:1,node2:2") as (job, _):
        lab.cut("node3")
        result = outcome(job, 60)
    assert result["sizes"] == [3, 2, 3] and result["alike"], result["said"]
    assert result["summary"] == pytest.approx(reference(400), abs=1e-12)
    assert "rank 3 starts on node2" in str(result["said"])


def kept(folder: Path) -> tuple[str, ...]:
    return ("--elastic-checkpoints", str(folder), "--elastic-save-s", "0.2")


@pytest.mark.parametrize("lost", ["rank", pytest.param("host", marks=pytest.mark.slow)])
def test_under_mpich_a_job_is_started_again_without_what_it_has_lost(
    lost: str, lab: Lab, mpich_python: str, tmp_path: Path
) -> None:
    options = ("-np", "3", "--min-np", "2", *kept(tmp_path / "kept"))
    with training(lab, 200, *options, python=mpich_python) as (job, said):
        read_until_line(job, said, "committed 60")
        signal_rank(lab, job, 1, signal.SIGKILL) if lost == "rank" else lab.cut("node3")
        result = outcome(job, 80)
    errors = str(result["said"])
    assert result["sizes"] == [3, 3 if lost == "rank" else 2] and result["alike"], errors
    assert result["summary"] == pytest.approx(reference(200), abs=1e-12)
    assert re.match(r"hvdrun: with this MPI \(MPICH \S+\) ranks cannot continue when one dies: hvdrun starts", errors)
    assert ("node3 is excluded from now on" in errors) == (lost == "host")
    where = "2 ranks on node1:1, node2:1" if lost == "host" else "3 ranks on node1:1, node2:1, node3:1"
    assert f"starting again with {where}, from the last checkpoint" in errors


@pytest.mark.slow
def test_a_job_that_is_lost_as_mpirun_loses_a_daemon_is_started_again(lab: Lab, tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", *kept(tmp_path / "kept"))
    with training(lab, 600, *options) as (job, said):
        read_until_line(job, said, "committed 60")
        lab.run("node3", ["pkill", "-9", "prted"])
        result = outcome(job, 80)
    assert result["summary"] == pytest.approx(reference(600), abs=1e-12), result["said"]
    assert "starting again" in str(result["said"]) and result["alike"]


def read_until_line(job: Job, said: list[str], what: str) -> None:
    assert job.process.stdout is not None
    while what not in said[-1]:
        said.append(job.process.stdout.readline())
        assert said[-1], (said, job.process.communicate())


@pytest.mark.slow
def test_a_host_that_was_lost_is_used_again_when_it_is_back(lab: Lab, mpich_python: str, tmp_path: Path) -> None:
    cooldown = ("--blacklist-cooldown-range", "2", "6")
    options = ("-np", "3", "--min-np", "2", *cooldown, *kept(tmp_path / "kept"))
    with training(lab, 1200, *options, python=mpich_python) as (job, said):
        read_until_line(job, said, "committed 60")
        lab.cut("node3")
        read_until(job, said, "committed", 2)
        lab.mend("node3")
        result = outcome(job, 90)
    errors = str(result["said"])
    assert result["sizes"] == [3, 2, 3] and result["alike"], errors
    assert result["summary"] == pytest.approx(reference(1200), abs=1e-12)
    assert "node3 is excluded for" in errors and "the hosts have slots for 3 ranks" in errors
