"""hvdkit doctor on one host: what it concludes from facts, and what it says of this machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import GPUS, HEALTHY, facts_with

from hvdkit.tools import doctor as doctor_package
from hvdkit.tools.doctor.checks.mpi import assess_engines, assess_transports, list_choices
from hvdkit.tools.doctor.collect.mpi import library_kind
from hvdkit.tools.doctor.collect.probes import run_probe
from hvdkit.tools.doctor.collect.software import parse_gpus, read_keras_backend
from hvdkit.tools.doctor.evaluate import check_host
from hvdkit.tools.doctor.facts import Accelerators, Horovod, HvdrunMpi, Launcher, MpiLibrary
from hvdkit.tools.doctor.findings import Finding, exit_code, sort_findings
from hvdkit.tools.doctor.hosts.session import OF_PYTHON, OF_SSH
from hvdkit.transport.mpi.library import shorten_load_error

MPICH_ON_PATH = (Launcher("mpirun", "/usr/bin/mpirun", "mpich", "4.0"),)

WITHOUT_TORCH = {name: version for name, version in HEALTHY.packages.items() if name != "torch"}

# One thing broken -> the name of the one finding, and its severity.
BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "no framework": ({"packages": {"mpi4py": "4.1.2"}, "horovod": Horovod()}, "framework-missing", "warning"),
    "two tensorflows": ({"packages": {**HEALTHY.packages, "tensorflow-cpu": "2.21.0"}}, "tensorflow-twice", "error"),
    "old Keras": ({"packages": {**HEALTHY.packages, "keras": "2.15.0"}}, "keras-old", "warning"),
    "Keras on a backend that is missing": ({"keras_backend": "jax"}, "keras-backend", "error"),
    "Keras on no backend at all": ({"keras_backend": "theano"}, "keras-backend", "error"),
    "settings": ({"settings": {}, "settings_error": "HVDKIT_FUSION_BYTES='x'"}, "settings", "error"),
    "no mpi4py": ({"mpi": MpiLibrary()}, "mpi-missing", "warning"),
    "no MPI library": ({"mpi": MpiLibrary("4.1.2", error="cannot load MPI library")}, "mpi-missing", "warning"),
    "no MPI and no Gloo": (
        {"mpi": MpiLibrary(), "packages": WITHOUT_TORCH, "keras_backend": "tensorflow"},
        "mpi-missing",
        "error",
    ),
    "MPI that does not start": ({"mpi__threads": "", "mpi__error": "no end within 15 s"}, "mpi-missing", "warning"),
    "MPI for the main thread": ({"mpi__threads": "MPI_THREAD_FUNNELED"}, "mpi-missing", "warning"),
    "MPI for one thread at a time": ({"mpi__threads": "MPI_THREAD_SERIALIZED"}, "mpi-threads", "note"),
    "no mpirun": ({"hvdrun": HvdrunMpi(error="There is no mpirun."), "launchers": ()}, "mpirun-missing", "error"),
    "mpirun of another MPI": ({"launchers": MPICH_ON_PATH}, "launcher-of-other-mpi", "warning"),
    "hvdrun with another MPI": (
        {"launchers": MPICH_ON_PATH, "hvdrun": HvdrunMpi("/usr/bin/mpirun", "mpich", "MPICH", "4.0", True)},
        "launcher-of-other-mpi",
        "error",
    ),
    "a launcher that breaks": (
        {"launchers": (*HEALTHY.launchers, Launcher("jsrun", "/x/jsrun", error="boo")), "environ": {"LSB_JOBID": "1"}},
        "launcher-broken",
        "warning",
    ),
    "another Horovod": ({"horovod__version": "0.27.0"}, "horovod-version", "warning"),
    "Horovod for another torch": (
        {"horovod__built_for": {"torch": "2.12.0"}, "horovod__errors": {"torch": "undefined symbol"}},
        "horovod-built-for-other",
        "warning",
    ),
    "Horovod that breaks": ({"horovod__errors": {"torch": "undefined symbol"}}, "horovod-broken", "warning"),
    "Horovod wanted, not there": (
        {"horovod": Horovod(), "settings": {"engine": "horovod"}},
        "engine-missing",
        "error",
    ),
    "torch for CPUs": ({"accelerators__torch_cuda": ""}, "gpu-unused", "warning"),
    "no driver": ({"accelerators": Accelerators(error="boo", torch_cuda="13.0")}, "gpu-driver", "warning"),
    "no GPU visible": ({"accelerators__visible": ""}, "gpu-hidden", "warning"),
    "a GPU that is not there": ({"accelerators__visible": "0,4"}, "gpu-not-there", "error"),
    "all for CPUs": (
        {"packages": {"jax": "0.10.2"}, "accelerators__cuda_of": {"jax": ""}, "accelerators__torch_cuda": ""}
        | {"horovod": Horovod(), "keras_backend": "jax"},
        "gpu-unused",
        "warning",
    ),
    "a driver for CUDA 12": ({"accelerators__driver": "575.57.08"}, "cuda-driver-old", "error"),
    "a driver that says CUDA 12": ({"accelerators__driver_cuda": "12.9"}, "cuda-driver-old", "error"),
    "a driver too old for JAX": (
        {"accelerators__driver": "470.1", "accelerators__torch_cuda": "11.8", "accelerators__cuda_of": {"jax": "12"}},
        "cuda-driver-old",
        "error",
    ),
    "NCCL for two CUDAs": (
        {"accelerators__nccl_wheels": {"nvidia-nccl-cu13": "2.28.3", "nvidia-nccl-cu12": "2.27.7"}},
        "nccl-twice",
        "warning",
    ),
    "no NCCL": ({"accelerators__nccl": "", "accelerators__nccl_error": "no such file"}, "nccl-missing", "warning"),
    "no NCCL, and it is asked for": (
        {"accelerators": Accelerators(nccl_error="no such file"), "settings": {"device_transport": "nccl"}},
        "nccl-missing",
        "error",
    ),
    "an NCCL that is named and not there": (
        {"accelerators": Accelerators(nccl_error="no such file"), "settings": {"nccl_library": "/x/libnccl.so.2"}},
        "nccl-missing",
        "warning",
    ),
    "an old NCCL": ({"accelerators__nccl": "2.17.1"}, "nccl-old", "warning"),
    "a GPU with the memory of an earlier job": (
        {"accelerators__gpus": (*GPUS[:3], replace(GPUS[3], used_bytes=60 * 2**30))},
        "gpu-in-use",
        "warning",
    ),
    "a GPU twice, by number and name": ({"accelerators__visible": f"0,{GPUS[0].uuid}"}, "gpu-twice", "error"),
    "a GPU twice": ({"accelerators__visible": "1,1"}, "gpu-twice", "error"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_found_and_nothing_else(fault: str) -> None:
    changes, name, severity = BROKEN[fault]
    findings = check_host(facts_with(**changes))
    assert [(finding.name, finding.severity) for finding in findings] == [(name, severity)]
    assert findings[0].seen
    assert findings[0].cure


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"horovod": Horovod()},
        {"launchers": (*HEALTHY.launchers, Launcher("srun", "/usr/bin/srun", error="no controller"))},
        {"launchers": (*HEALTHY.launchers, Launcher("srun", "/x/srun", error="boo")), "environ": {"LSB_JOBID": "1"}},
        {"accelerators": Accelerators()},
        {"accelerators__visible": "0,1"},
        {"accelerators__cuda_of": {"tensorflow": "", "jax": ""}},  # torch is the one that trains
        {"accelerators__driver": "535.1", "accelerators__driver_cuda": "13.0"},  # by NVIDIA's compatibility package
        {"accelerators__driver": "525.6", "accelerators__torch_cuda": "12.9"},  # the same major version is enough
        {"accelerators": Accelerators(nccl_error="no such file")},  # no GPU needs it
        {"accelerators__visible": GPUS[2].uuid},
        {"packages": {"torch": "2.13.0+cpu"}, "accelerators": Accelerators(), "horovod": Horovod()},
        {"launchers": MPICH_ON_PATH, "hvdrun": HvdrunMpi("/m", "mpich", "MPICH", "4.0", True, "/m/libmpi.so")}
        | {"mpi__library": "MPICH Version: 4.0", "mpi__kind": "mpich"},
    ],
)
def test_a_healthy_host_has_no_findings(changes: dict[str, Any]) -> None:
    assert check_host(facts_with(**changes)) == []


def test_a_table_says_of_every_finding_how_it_was_made() -> None:
    table = (Path(__file__).parents[1] / "cluster" / "README.md").read_text()
    names = {cause[1] for cause in (*OF_PYTHON, *OF_SSH)}
    for path in Path(doctor_package.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).partition(".")[0] == "Finding":
                name = call.args[0 if isinstance(call.func, ast.Attribute) else 1]
                names |= {str(name.value)} if isinstance(name, ast.Constant) else set()
    assert len(names) > 60
    assert [name for name in sorted(names) if f"`{name}`" not in table] == []


def test_the_exit_code_follows_the_worst_finding() -> None:
    note, warning, error = (Finding(severity, "x", "seen", "cure") for severity in ("note", "warning", "error"))
    several: tuple[list[Finding], ...] = ([], [note], [note, warning], [warning, error])
    assert [exit_code(findings) for findings in several] == [0, 0, 0, 1]
    assert [exit_code(findings, strict=True) for findings in several] == [0, 0, 1, 1]
    assert sort_findings([note, error, warning]) == [error, warning, note]


def test_what_works_and_what_would_be_taken() -> None:
    assert all(ability.works for ability in [*assess_engines(HEALTHY), *assess_transports(HEALTHY)])
    assert [choice.transport for choice in list_choices(HEALTHY)] == [
        "single",
        "shared_memory",
        "mpi",
        "hierarchical",
        "shared_memory",
    ]
    bare = facts_with(mpi=MpiLibrary(), packages={}, horovod=Horovod())
    assert [ability.works for ability in assess_transports(bare)] == [True, False, False, False, False]
    assert [ability.works for ability in assess_engines(bare)] == [True, False]
    assert all(ability.cure for ability in assess_transports(bare) if not ability.works)
    assert [choice.transport for choice in list_choices(bare)] == ["single", *["none"] * 4]
    horovod = facts_with(settings={"engine": "horovod"})
    assert {choice.transport for choice in list_choices(horovod)} == {"Horovod's own"}
    under = facts_with(launchers=(Launcher("horovodrun", "/env/bin/horovodrun"),))
    assert [(choice.engine, choice.transport) for choice in list_choices(under)][-1] == ("horovod", "Horovod's own")
    without_gloo = facts_with(packages=WITHOUT_TORCH)
    assert [choice.transport for choice in list_choices(without_gloo)][-1] == "none"
    shared = facts_with(settings={"transport": "shared_memory"})
    assert [choice.transport for choice in list_choices(shared)][2:4] == ["none", "none"]
    rank = facts_with(environ={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert next(list_choices(rank)).start == "this process (openmpi, 4 ranks)"


@pytest.mark.parametrize(
    ("says", "kind", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host", "open_mpi", "Open MPI 5.0.11"),
        ("IBM Spectrum MPI v10.3", "open_mpi", "Open MPI 10.3"),
        ("MPICH Version: 5.0.2 MPICH Release date: unreleased", "mpich", "MPICH 5.0.2"),
        ("MPI VERSION : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", "cray_mpich", "Cray MPICH 8.1.28.15"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "intel_mpi", "Intel MPI 2021.13"),
        ("MVAPICH Version : 3.0 MPICH", "mvapich", "MVAPICH 3.0"),
        ("Somebody's MPI, v1", "", "Somebody's MPI"),
        ("", "", ""),
    ],
)
def test_the_kind_of_a_library(says: str, kind: str, name: str) -> None:
    assert library_kind(says) == kind
    assert MpiLibrary(library=says, kind=kind).name == name


def test_nvidia_smi_is_read() -> None:
    lines = "0, GPU-5f, NVIDIA A100, 40960 MiB, 535.1, 7 MiB\n1, GPU-6f, NVIDIA A100, [N/A], 535.1\nnoise\n"
    gpus, driver = parse_gpus(lines)
    assert [(gpu.index, gpu.uuid, gpu.memory_bytes) for gpu in gpus] == [(0, "GPU-5f", 40960 * 2**20), (1, "GPU-6f", 0)]
    assert [gpu.used_bytes for gpu in gpus] == [7 * 2**20, 0] and driver == "535.1"


def test_kerass_backend_is_what_keras_would_take(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert read_keras_backend(home) == ("tensorflow", "Keras's default")
    (tmp_path / ".keras").mkdir()
    path = tmp_path / ".keras" / "keras.json"
    path.write_text("[1]")
    assert read_keras_backend(home)[0] == "tensorflow"
    path.write_text('{"backend": "jax"}')
    assert read_keras_backend(home) == ("jax", str(path))
    assert read_keras_backend({**home, "KERAS_BACKEND": "torch"}) == ("torch", "KERAS_BACKEND")


def test_a_probe_that_dies_says_how(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("import os; os.abort()")
    answer = run_probe("load_mpi", {"PYTHONPATH": str(tmp_path)}, 20)
    assert answer["error"].startswith("it was killed by SIGABRT")
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise RuntimeError('cannot load MPI library')")
    assert run_probe("load_mpi", {"PYTHONPATH": str(tmp_path)}, 20) == {"error": "cannot load MPI library"}


def test_a_missing_mpi_library_is_said_once_and_any_other_error_of_loading_in_full() -> None:
    gone = "{}: cannot open shared object file: No such file or directory".format
    missing = ["cannot load MPI library", gone("/env/lib/libmpi.so"), gone("/env/lib/libmpi.so.12"), gone("libmpi.so")]
    said = "there is no libmpi.so or libmpi.so.12 in /env/lib or the folders of the system"
    for separator in ("\n", " "):  # as mpi4py and as the probe write it
        assert shorten_load_error(separator.join(missing)) == said
    for other in (gone("libhwloc.so.15"), "/env/lib/libmpi.so.40: wrong ELF class"):
        whole = "\n".join([*missing, other])
        assert shorten_load_error(whole) == whole


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", "doctor", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def without_horovod(folder: Path) -> str:
    """PYTHONPATH for an environment that seems to have no Horovod, which takes seconds to load."""
    (folder / "horovod-0.dist-info").mkdir()
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_this_machine_as_json(tmp_path: Path) -> None:
    answer = doctor("--json", PYTHONPATH=without_horovod(tmp_path), HVDKIT_PROFILE="the key@1@127.0.0.1")
    assert "the key" not in answer.stdout
    told = json.loads(answer.stdout)
    assert answer.returncode == told["exit_code"] == exit_code([Finding(**finding) for finding in told["findings"]])
    assert told["facts"]["python"] == sys.version.split()[0]
    assert told["facts"]["mpi"]["library"].startswith(("Open MPI", "MPICH", "Intel"))
    assert {entry["name"] for entry in told["transports"] if entry["works"]} >= {"single", "mpi", "shared_memory"}
    assert [entry["transport"] for entry in told["choices"]][:2] == ["single", "shared_memory"]
    assert told["counts"]["error"] == 0
    assert not any("PASSWORD" in name for name in told["facts"]["environ"])


def test_this_machine_as_a_table() -> None:
    answer = doctor("--verbose", COLUMNS="200")
    assert answer.stderr == ""
    for word in ("MPI library", "mpi4py", "hierarchical", "hvdrun -np 2"):
        assert word in answer.stdout
    assert ("build-horovod" in answer.stdout) == (importlib.util.find_spec("horovod") is None)
    assert answer.returncode in (0, 1)


def test_what_is_wrong_is_an_error_with_its_cure(tmp_path: Path) -> None:
    answer = doctor(HVDKIT_FUSION_BYTES="many", COLUMNS="200", PYTHONPATH=without_horovod(tmp_path))
    assert answer.returncode == 1
    assert answer.stdout.splitlines()[0].startswith("1 error")
    assert "HVDKIT_FUSION_BYTES='many'" in answer.stdout.splitlines()[1]


def test_an_mpirun_of_another_mpi_on_path_is_found(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version:    4.1.2'\n")
    mpirun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    answer = doctor("--json", PATH=path, PYTHONPATH=without_horovod(tmp_path))
    found = {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}
    assert "MPICH 4.1.2" in found["launcher-of-other-mpi"]["seen"]
    assert answer.returncode == 1
    assert found["launcher-of-other-mpi"]["severity"] == "error"
