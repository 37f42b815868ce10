"""MPICH's launcher and library on three hosts, and under Slurm."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from cluster.jobs import EVERYWHERE, MEET, running, signal_rank
from cluster.lab import Lab, environment, wait_until
from cluster.slurm import Slurm

pytestmark = pytest.mark.cluster


@pytest.fixture
def python(mpich_python: str) -> str:
    """The python of an environment with MPICH."""
    return mpich_python


def said(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d of .*", output))


def test_hvdrun_takes_mpich_where_that_is_what_there_is(lab: Lab, python: str) -> None:
    command = [python, "-m", "hvdkit.launch", "--verbose", "-np", "3", "-H", EVERYWHERE, python, MEET]
    done = lab.run("node1", command, env=environment(PATH="/usr/bin:/bin"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hvdrun: MPICH 5" in done.stderr
    assert said(done.stdout) == [f"rank {n} of 3 on node{n + 1}, 0 of 1 there" for n in range(3)]


def test_its_own_mpiexec_starts_hvdkit_too(lab: Lab, python: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1:2\nnode2:2\n")
    mpiexec = str(Path(python).with_name("mpiexec"))
    done = lab.run("node1", [mpiexec, "-f", tmp_path / "hosts", "-n", "4", python, MEET])
    assert done.returncode == 0, done.stdout + done.stderr
    assert said(done.stdout) == [f"rank {n} of 4 on node{n // 2 + 1}, {n % 2} of 2 there" for n in range(4)]


def test_a_rank_that_is_killed_is_named_and_nothing_is_left(lab: Lab, python: str) -> None:
    with running(lab, "deaf", python=python, env=environment(PATH="/usr/bin:/bin")) as job:
        signal_rank(lab, job, 1, signal.SIGKILL)
        code, words, _ = job.end(10)
    assert code == 137, words
    assert "rank 1 on node2 was killed by SIGKILL" in words


def test_a_cut_link_leaves_nothing_beyond_it(lab: Lab, python: str) -> None:
    with running(lab, "deaf", python=python, env=environment(PATH="/usr/bin:/bin")) as job:
        lab.cut("node3")
        code, words, _ = job.end(20)
        assert code not in (0, None)
        assert "rank 2 on node3 was lost" in words
        assert wait_until(lambda: not lab.strays(), 20), lab.strays()


@pytest.mark.parametrize("start", ["{folder}/mpiexec", "srun --mpi=pmi2"])
def test_in_a_batch_script(slurm: Slurm, python: str, tmp_path: Path, start: str) -> None:
    line = f"{start.format(folder=Path(python).parent)} {python} {MEET}"
    code, output = slurm.batch(tmp_path, line, "--nodes=2", "--ntasks-per-node=2")
    assert code == 0, output
    assert said(output) == [f"rank {n} of 4 on node{n // 2 + 1}, {n % 2} of 2 there" for n in range(4)]
