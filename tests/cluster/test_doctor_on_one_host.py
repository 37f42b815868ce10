"""hvdkit doctor on one host of the lab that has one fault: it finds that, and nothing else.

What the host lacks is stood in for where the table in tests/cluster/README.md says so.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster.doctor import look_here
from cluster.host_faults import done, edited, folders_of, hidden, names_of, plant_package, plant_program
from cluster.lab import ROOT, Lab, environment
from cluster.needs import libfaketime, missing_for_faults

from hvdkit.tools.installed import read_frameworks

pytestmark = pytest.mark.cluster

PATH = environment()["PATH"]
#: What nvidia-smi prints on a host with two GPUs.
GPUS = "\n".join(f"echo '{number}, GPU-{number}aa, NVIDIA H100, 81559 MiB, 580.1'" for number in range(2))
TRAIN = """\
    import os
    import torch
    torch.cuda.init()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
"""

#: What a shell does before it starts doctor -> what that finds.
IN_A_SHELL = {
    "ulimit -n 256; ulimit -u 500; export MASTER_PORT=22 RANK=0 HVDKIT_FUSION_BYTES=many": [
        "limit-files",
        "limit-processes",
        "master-port",
        "rank-exported",
        "settings",
    ],
    "export HVDKIT_SHARED_DIRECTORY=/nowhere HVDKIT_ENGINE=horovod OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4": [
        "engine-missing",
        "launcher-variables",
        "shm-missing",
    ],
    "export HVDKIT_SHARED_DIRECTORY=/var MPI4PY_LIBMPI=/no/libmpi.so": ["mpi-missing", "shm-on-disk"],
}


@pytest.fixture(autouse=True)
def _one_without_horovod(lab: Lab) -> Iterator[None]:
    with hidden(lab, "node1", *folders_of("horovod")):
        yield


@pytest.mark.parametrize("shell", IN_A_SHELL)
def test_what_a_shell_sets(lab: Lab, shell: str) -> None:
    assert look_here(lab, "node1", shell=shell) == IN_A_SHELL[shell]


def test_more_ranks_than_cores(lab: Lab) -> None:
    assert look_here(lab, "node1", "-np", str(os.cpu_count() or 1) + "0") == ["few-cores"]


def test_a_clock_that_is_behind(lab: Lab, tmp_path: Path) -> None:
    # hvdkit as it would be after an installation an hour from now.
    folder = tmp_path / "hvdkit"
    folder.mkdir()
    for path in (ROOT / "hvdkit").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "cli.py").unlink()
    shutil.copy(ROOT / "hvdkit" / "cli.py", folder)
    later = time.time() + 3600
    os.utime(folder / "cli.py", (later, later))
    assert look_here(lab, "node1", PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}") == ["clock-behind"]


def test_what_dead_jobs_left_in_shared_memory(lab: Lab) -> None:
    if problem := missing_for_faults():
        pytest.skip(problem)
    with done(lab, "node1", "echo x >/dev/shm/hvdkit-1-aa", "rm /dev/shm/hvdkit-1-aa"):
        assert look_here(lab, "node1") == []  # it may be of a job that is just starting
        later = f"export FAKETIME=+300s LD_PRELOAD={libfaketime()}"
        assert look_here(lab, "node1", shell=later) == ["shm-leftovers"]


def test_a_localhost_that_is_another_host(lab: Lab) -> None:
    with edited(names_of(lab, "node1"), ("127.0.0.1 localhost", "10.77.0.12 localhost")):
        assert look_here(lab, "node1") == ["localhost"]


@pytest.mark.parametrize(
    ("packages", "finding"),
    [
        ({"keras": "2.15.0"}, "keras-old"),
        ({"tensorflow": "2.20.0", "tensorflow_cpu": "2.20.0"}, "tensorflow-twice"),
    ],
)
def test_packages_that_do_not_go_together(lab: Lab, tmp_path: Path, packages: dict[str, str], finding: str) -> None:
    for name, version in packages.items():
        plant_package(tmp_path, name, version)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    assert look_here(lab, "node1", PYTHONPATH=path, KERAS_BACKEND="torch") == [finding]


def test_a_backend_that_keras_does_not_have(lab: Lab) -> None:
    if not folders_of("keras"):
        pytest.skip("keras is not installed")
    assert look_here(lab, "node1", KERAS_BACKEND="theano") == ["keras-backend"]


def test_no_framework(lab: Lab) -> None:
    packages = [folder for name in ("torch", "tensorflow_cpu", "tensorflow", "jax") for folder in folders_of(name)]
    with hidden(lab, "node1", *packages), hidden(lab, "node1", *folders_of("keras")):
        assert look_here(lab, "node1") == ["framework-missing"]


def test_a_horovod_of_another_version_and_one_without_its_library(lab: Lab, tmp_path: Path) -> None:
    plant_package(tmp_path, "horovod", "0.27.0")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    assert look_here(lab, "node1", PYTHONPATH=path) == ["horovod-version"]


def test_a_horovod_that_was_built_for_another_torch(lab: Lab, tmp_path: Path) -> None:
    if not folders_of("horovod"):
        pytest.skip("Horovod is not installed; run: hvdkit build-horovod")
    plant_package(tmp_path, "torch", "9.9")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    with hidden(lab, "node2", *folders_of("tensorflow")[:1]):  # one framework is enough to load
        told = look_here(lab, "node2", PYTHONPATH=path)
    assert told == ["horovod-built-for-other"]


def test_a_launcher_of_another_mpi(lab: Lab, mpich_python: str) -> None:
    assert look_here(lab, "node1", PATH=f"{Path(mpich_python).parent}:{PATH}") == ["launcher-of-other-mpi"]


def test_launchers_that_do_not_work(lab: Lab, tmp_path: Path) -> None:
    own = f"{sys.prefix}/bin/mpirun"
    plant_program(tmp_path, "mpirun", f'case "$1" in --version) exec {own} "$@";; esac; echo "no daemon" >&2; exit 3')
    plant_program(tmp_path, "jsrun", "echo 'no such queue' >&2; exit 1")
    found = look_here(lab, "node1", PATH=f"{tmp_path}:{PATH}", LSB_JOBID="1")
    assert found == ["launcher-broken", "mpirun-fails"]


def test_locked_memory_for_a_fast_network(lab: Lab) -> None:
    with _infiniband(lab, "node1"):
        assert look_here(lab, "node1", shell="ulimit -l 64") == ["limit-memlock"]


@pytest.mark.parametrize(
    ("ranks", "visible", "finding"),
    [
        ("1", "0,5", "gpu-not-there"),
        ("2", "1,1", "gpu-twice"),
        ("2", "", "gpu-hidden"),
        ("2", "1", "gpu-shared"),
        ("1", "0,1", "gpu-idle"),
    ],
)
def test_gpus_and_who_sees_them(lab: Lab, tmp_path: Path, ranks: str, visible: str, finding: str) -> None:
    plant_program(tmp_path, "nvidia-smi", GPUS)
    found = look_here(lab, "node1", "-np", ranks, PATH=f"{tmp_path}:{PATH}", CUDA_VISIBLE_DEVICES=visible)
    unused = [] if read_frameworks().torch_cuda else ["gpu-unused"]  # by a torch that is a build for CPUs
    assert found == sorted([finding, *unused])


def test_a_driver_that_does_not_answer(lab: Lab, tmp_path: Path) -> None:
    plant_program(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert look_here(lab, "node1", PATH=f"{tmp_path}:{PATH}") == ["gpu-driver"]


def test_a_script_for_one_process_that_chooses_its_device_too_late(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    found = look_here(lab, "node1", "-np", "2", "--script", str(script), LSB_JOBID="1")
    assert found == ["no-checkpoint", "script-not-distributed", "visible-devices-late"]
    assert look_here(lab, "node1", "--script", str(tmp_path / "none.py")) == ["script"]


def _infiniband(lab: Lab, host: str) -> ExitStack:
    stack = ExitStack()
    make = "mkdir -p /run/class/infiniband/mlx5_0; cp -a /sys/class/net /run/class; mount --bind /run/class /sys/class"
    stack.enter_context(done(lab, host, make, "umount /sys/class; rm -r /run/class"))
    return stack
