"""hvdkit doctor inside allocations of a real Slurm, whose hosts have two GPUs each as far as Slurm can tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.doctor import DOCTOR, found
from cluster.host_faults import plant_program
from cluster.lab import environment
from cluster.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("without_horovod")]

LOOK = " ".join(DOCTOR)
LOOK_HERE = f"{LOOK} --here"
#: srun of this Slurm speaks no PMI unless it is told to: found in every allocation.
ALWAYS = "srun-singletons"


def run(slurm: Slurm, folder: Path, body: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """What doctor wrote to doctor.json in a batch script, and the names of what it found."""
    _, output = slurm.batch(folder, body, *options)
    path = folder / "doctor.json"
    assert path.exists() and path.read_text(), output
    told: dict[str, Any] = json.loads(path.read_text())
    return told, [name for name, _ in found(told)]


def test_hosts_are_found_and_reached_by_srun(slurm: Slurm, tmp_path: Path) -> None:
    told, names = run(slurm, tmp_path, f"{LOOK} >doctor.json", "--nodes=3", "--ntasks-per-node=2", "--exclusive")
    assert told["via"] == "srun"
    assert [(host["name"], host["slots"]) for host in told["hosts"]] == [("node1", 2), ("node2", 2), ("node3", 2)]
    assert len(told["allreduce"]["ranks"]) == 6
    assert names == [ALWAYS]
    assert "--mpi=pmix" in told["findings"][0]["cure"]


def test_a_script_that_asks_for_what_fits_is_only_told_of_srun(slurm: Slurm, tmp_path: Path) -> None:
    options = ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2")
    _, names = run(slurm, tmp_path, f"{LOOK_HERE} >doctor.json", *options)
    assert names == [ALWAYS]


def test_tasks_and_gpus_that_do_not_fit(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    body = f"export RANK=0 MASTER_PORT=29500\n{LOOK_HERE} --script train.py >doctor.json"
    options = ("--array=3", "--nodes=2", "--ntasks=3", "--ntasks-per-node=2", "--cpus-per-task=2", "--gres=gpu:1")
    _, names = run(slurm, tmp_path, body, *options)
    assert names == [
        "cpus-per-task",
        "master-port",
        "no-checkpoint",
        "rank-exported",
        "script-not-distributed",
        "slurm-gpus",
        "slurm-tasks",
        ALWAYS,
    ]


def test_tasks_that_are_left_to_slurm(slurm: Slurm, tmp_path: Path) -> None:
    _, names = run(slurm, tmp_path, f"{LOOK_HERE} >doctor.json", "--nodes=2", "--ntasks=3")
    assert names == ["slurm-tasks", ALWAYS]


def test_a_task_that_sees_one_gpu_and_takes_its_rank_for_it(slurm: Slurm, tmp_path: Path) -> None:
    script = "import hvdkit.torch as hvd\nhvd.init()\ntorch.cuda.set_device(hvd.local_rank())\ntorch.save(1, 'x')\n"
    (tmp_path / "train.py").write_text(script)
    second = f"[ $SLURM_PROCID = 0 ] || exec {LOOK_HERE} --script train.py"
    body = f"srun --gpus-per-task=1 sh -c '{second}' >doctor.json"
    told, names = run(slurm, tmp_path, body, "--nodes=1", "--ntasks=2", "--gres=gpu:2")
    assert names == ["device-by-rank"]
    assert "CUDA_VISIBLE_DEVICES=1)" in told["findings"][0]["seen"]


def test_torchrun_that_is_started_for_each_gpu(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # One of the four ranks looks.
    (tmp_path / "rank.sh").write_text(f'[ "$SLURM_PROCID$LOCAL_RANK" != 11 ] || exec {LOOK_HERE}\n')
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 --no-python"
    body = f"srun {torchrun} sh rank.sh >doctor.json"
    _, names = run(slurm, tmp_path, body, "--nodes=1", "--ntasks=2", "--gres=gpu:2")
    assert names == ["torchrun-per-gpu"]


def test_torchs_backend_mpi_with_a_library_that_it_does_not_know(
    slurm: Slurm, mpich_python: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.distributed.init_process_group('mpi')\n")
    plant_program(tmp_path / "bin", "nvidia-smi", "echo '0, GPU-0aa, NVIDIA H100, 81559 MiB, 580.1'")
    where = environment()
    where["PATH"] = f"{tmp_path}/bin:{Path(mpich_python).parent}:{where['PATH']}"
    body = f"{mpich_python} {' '.join(DOCTOR[1:])} --here --script train.py >doctor.json"
    _, output = slurm.batch(tmp_path, body, "--nodes=1", "--ntasks=1", env=where)
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert {"backend-mpi", "no-checkpoint"} <= {name for name, _ in found(told)}, output
