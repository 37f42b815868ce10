"""Keras' own distribution, and JAX's, on three hosts: rank 0's address is one that the others reach."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from cluster.jobs import EVERYWHERE, HVDRUN
from cluster.lab import ROOT, Lab, environment
from cluster.slurm import Slurm
from cluster.test_slurm import OPEN_MPI
from test_jax_distribution import JAX, SCRIPT, run

pytestmark = pytest.mark.cluster

TESTS = ROOT / "tests" / "support"
COMMAND = [sys.executable, str(TESTS / "without_tensorflow.py"), SCRIPT]
ON_JAX = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _needs() -> None:
    for package in ("keras", "jax"):
        pytest.importorskip(package)


def read(folder: Path, rank: int, parts: int = 1) -> dict[str, np.ndarray]:
    with np.load(folder / f"{rank}-{parts}.npz") as file:
        return dict(file)


def check_weights(folder: Path, alone: Path, ranks: int, parts: int = 1) -> None:
    for rank in range(ranks):
        for name, weight in read(folder, rank, parts).items():
            if name == "held":
                assert weight.tolist() == [64, 128 // parts]
            else:
                np.testing.assert_allclose(weight, read(alone, 0)[name], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    done = run([], SCRIPT, str(folder), "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_ranks_of_hvdrun_train_as_one_process_does(lab: Lab, tmp_path: Path, alone: Path) -> None:
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [*HVDRUN, "-np", "2", "-H", "node1:1,node2:1", *COMMAND, str(tmp_path), "1", "2"]
    done = lab.run("node1", command, env=environment(**ON_JAX, **proxy), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    check_weights(tmp_path, alone, 2)
    check_weights(tmp_path, alone, 2, parts=2)


def test_ranks_of_mpirun_agree_on_an_address(lab: Lab, tmp_path: Path, alone: Path) -> None:
    mpirun = [f"{sys.prefix}/bin/mpirun", "--host", "node2:1,node1:1,node3:1", "-n", "3"]
    for name in ON_JAX:
        mpirun += ["-x", name]
    done = lab.run("node1", [*mpirun, *COMMAND, str(tmp_path), "1"], env={**OPEN_MPI, **ON_JAX}, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    check_weights(tmp_path, alone, 3)


def test_ranks_of_srun_agree_on_an_address(slurm: Slurm, tmp_path: Path, alone: Path) -> None:
    body = f"srun --mpi=pmix {' '.join(COMMAND)} {tmp_path} 1"
    code, output = slurm.batch(
        tmp_path, body, "--nodes=2", "--ntasks-per-node=1", env={**OPEN_MPI, **ON_JAX}, timeout=150
    )
    assert code == 0, output
    check_weights(tmp_path, alone, 2)


def test_jax_by_itself_needs_no_arguments_under_hvdrun(lab: Lab) -> None:
    command = [*HVDRUN, "-np", "3", "-H", EVERYWHERE, sys.executable, "-c", JAX]
    done = lab.run("node1", command, env=environment(**ON_JAX), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2 of 3 sees 3" in done.stdout
