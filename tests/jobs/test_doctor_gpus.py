"""What hvdkit doctor collects of GPUs and NCCL: stand-ins for nvidia-smi, CUDA's driver, NCCL and records of wheels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from recorded_nodes import plant_node
from stand_in import find_compiler, stand_in_path

from hvdkit.tools.doctor.collect.software import read_accelerators, read_builds

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"
)


def plant_wheel(folder: Path, name: str, version: str) -> None:
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_gpus_the_driver_and_the_nccl_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "0, GPU-1, NVIDIA H200, 143771 MiB, 550.54.15"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listing}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "libcuda.so.1").symlink_to(stand_in_path())
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        plant_wheel(tmp_path, name, "2.30.7")
    monkeypatch.syspath_prepend(str(tmp_path))
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(tmp_path)}
    environ |= {"HVDKIT_NCCL_LIBRARY": stand_in_path(), "STAND_IN_NCCL_VERSION": "23102"}
    found = read_accelerators(environ)
    assert (found.driver, found.driver_cuda, len(found.gpus)) == ("550.54.15", "13.0", 1)
    assert (found.nccl, found.nccl_path, found.nccl_error) == ("2.31.2", stand_in_path(), "")
    assert found.nccl_wheels == {"nvidia-nccl-cu13": "2.30.7", "nvidia-nccl-cu12": "2.30.7"}
    assert read_accelerators({**environ, "STAND_IN_NCCL_VERSION": "2708"}).nccl == "2.7.8", "as before NCCL 2.9"
    missing = read_accelerators({**environ, "HVDKIT_NCCL_LIBRARY": "/no/libnccl.so.2"})
    assert "/no/libnccl.so.2: cannot open" in missing.nccl_error


def test_gpus_of_another_vendor_are_those_of_the_kernel_and_its_tool_names_them(tmp_path: Path) -> None:
    plant_node("frontier", tmp_path)
    for name in tmp_path.glob("sys/bus/pci/devices/*/product_name"):
        name.unlink()
    environ = {**os.environ, "PATH": str(tmp_path)}
    found = read_accelerators(environ, tmp_path)
    assert (found.vendor, len(found.gpus), found.error) == ("AMD", 8, "") and found.gpus[0].name == "AMD GPU"
    answer = '[{"gpu": 0, "asic": {"market_name": "MI250X"}, "driver": {"version": "6.8.5"}}]'
    (tmp_path / "amd-smi").write_text(f"#!/bin/sh\n[ \"$*\" = 'static --asic --driver --json' ] && echo '{answer}'\n")
    (tmp_path / "amd-smi").chmod(0o755)
    found = read_accelerators(environ, tmp_path)
    assert (found.driver, found.gpus[0].name, found.gpus[1].name) == ("6.8.5", "MI250X", "AMD GPU")
    (tmp_path / "opt/rocm/lib").mkdir(parents=True)
    (tmp_path / "opt/rocm/lib/librccl.so.1").symlink_to(stand_in_path())
    found = read_accelerators({**environ, "STAND_IN_NCCL_VERSION": "22205"}, tmp_path)
    assert (found.nccl, found.nccl_path) == ("2.22.5", str(tmp_path / "opt/rocm/lib/librccl.so.1"))
    (tmp_path / "amd-smi").write_text("#!/bin/sh\necho 'no permission'; exit 9\n")
    found = read_accelerators(environ, tmp_path)
    assert found.error.startswith("amd-smi printed 'no permission'") and len(found.gpus) == 8


def test_what_nvidia_smi_lists_is_completed_by_the_kernel(tmp_path: Path) -> None:
    plant_node("perlmutter", tmp_path)
    uuid = "GPU-2c0ffee0-0000-4000-8000-000000000000"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '2, {uuid}, NVIDIA A100, 40960 MiB, 580.1, 0 MiB'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (gpu,) = read_accelerators({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, tmp_path).gpus
    assert (gpu.index, gpu.bus, gpu.cpus) == (2, "0000:82:00.0", "16-31,80-95")


def test_for_which_cuda_frameworks_were_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("jax", "jax-cuda13-plugin", "tensorflow"):
        plant_wheel(tmp_path, name, "9.9")
    info = tmp_path / "tensorflow/python/platform/build_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("build_info = OrderedDict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])")
    assert read_builds()["jax"] == "13"
    assert read_builds()["tensorflow"] == "12.5.1"
    info.write_text("build_info = OrderedDict([('is_cuda_build', False)])")
    assert read_builds()["tensorflow"] == ""
