"""Intel MPI's launcher and library, from its wheel, on one host: between hosts they need libfabric, which it lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster.jobs import MEET
from cluster.lab import Lab, environment
from cluster.other_mpi import make_python

pytestmark = pytest.mark.cluster

WANTED = [f"rank {n} of 3 on node1, {n} of 3 there" for n in range(3)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, hosts: Lab) -> str:
    """The python of an environment with Intel MPI."""
    try:
        return str(make_python(tmp_path_factory.mktemp("intel") / "env", "impi-rt"))
    except RuntimeError as error:
        pytest.skip(str(error))


def said(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d of .*", output))


def test_hvdrun_takes_intel_mpi_where_that_is_what_there_is(lab: Lab, python: str) -> None:
    # The environment is not activated: hvdrun finds what is beside its Python.
    command = [python, "-m", "hvdkit.launch", "--verbose", "-np", "3", python, MEET]
    done = lab.run("node1", command, env=environment(PATH="/usr/bin:/bin"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hvdrun: Intel MPI 20" in done.stderr
    assert said(done.stdout) == WANTED


def test_hvdrun_tells_which_of_its_ranks_failed(lab: Lab, python: str) -> None:
    command = [python, "-m", "hvdkit.launch", "-np", "3", "sh", "-c", "[ $PMI_RANK != 1 ] || exit 5; sleep 60"]
    done = lab.run("node1", command, env=environment(PATH="/usr/bin:/bin"))
    assert done.returncode == 5, done.stdout + done.stderr
    assert "rank 1 on node1 failed with exit code 5" in done.stderr


def test_its_own_mpirun_starts_hvdkit_too(lab: Lab, python: str) -> None:
    path = f"{Path(python).parent}:/usr/bin:/bin"
    done = lab.run("node1", ["mpirun", "-n", "3", python, MEET], env=environment(PATH=path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert said(done.stdout) == WANTED
