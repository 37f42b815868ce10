"""HIP and RCCL over a stand-in in host memory, found by the names of their files: nothing here ran on a GPU.

A few cases of test_nccl.py, test_nccl_conformance.py, test_tensorflow_gpu.py and test_keras_gpu.py: what differs is the
driver's table, the current device in place of contexts, and which libraries a framework's build selects.
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import nccl_checks
import pytest
from keras_ranks import run_check
from ranks import run_ranks
from stand_in import compile_stand_in, find_compiler, rocm_variables
from test_nccl_conformance import QUICK, check

from hvdkit.errors import MissingDependencyError, TransportError
from hvdkit.transport.gpu_driver import Driver, GpuDevice
from hvdkit.transport.hip import HIP, HipDriver
from hvdkit.transport.nccl.library import RCCL, Library

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.native("device memory is reduced by hvdkit's own engine"),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"),
]


@pytest.fixture
def driver() -> HipDriver:
    return HipDriver(compile_stand_in("rocm"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_GPUS", "2")


def run_on_rocm(size: int, backend: str, check: str, *args: Any) -> None:
    run_check(size, backend, check, *args, env=rocm_variables())


@pytest.mark.slow
def test_the_checks_of_every_transport_where_late_work_matters() -> None:
    late = {"STAND_IN_PAUSE_US": "300"}
    run_ranks(3, check, sorted(QUICK), transport="shared_memory", env={**rocm_variables(), **late})


@pytest.mark.slow
@pytest.mark.parametrize("body", [nccl_checks.collectives, nccl_checks.order])
def test_communicators(body: Any) -> None:
    run_ranks(3, body, transport="shared_memory", env=rocm_variables())


def test_a_failure_of_hip_names_its_function_and_rccl() -> None:
    for said in run_ranks(2, nccl_checks.a_group_fails, transport="shared_memory", env=rocm_variables()):
        assert "hipStreamWaitEvent failed on GPU 0" in said[0] and "(hipError_t 700)" in said[0]
        assert "RCCL's operations on rank" in said[0] and set(said) == {said[0]}


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_tensorflow_trains_as_one_process(mode: str) -> None:
    run_on_rocm(2, "tensorflow", "tensorflow_gpu:on_gpu", "tensorflow_training", "as_one_process", mode, ["SGD"])


@pytest.mark.parametrize("check", ["train", pytest.param("apply_by_hand", marks=pytest.mark.slow)])
def test_jax_trains_as_one_process(check: str) -> None:
    run_on_rocm(2, "jax", f"keras_gpu:{check}", *([{}] if check == "train" else []))


@pytest.mark.slow
def test_buckets_on_jax() -> None:
    run_on_rocm(2, "jax", "keras_gpu:buckets", {}, 12)


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.keras("tensorflow")), "jax"])
def test_the_frameworks_build_selects_the_libraries(backend: str, tmp_path: Path) -> None:
    run_check(2, backend, f"{'keras' if backend == 'jax' else 'tensorflow'}_gpu:builds", str(tmp_path))


def test_a_thread_keeps_the_device_that_it_had(driver: Driver, two_gpus: None) -> None:
    second, now = GpuDevice(driver, 1), ctypes.c_int(-1)
    event, stream = second.make_event(), second.make_stream()
    event.record(stream)  # the stand-in refuses an event and a stream of two devices
    event.record(0)
    with second.current():
        GpuDevice(driver, 0).make_event()
        driver.call("get_device", now)
        assert now.value == 1
    driver.call("get_device", now)
    assert now.value == 0
    with pytest.raises(TransportError, match="hipEventRecord failed on GPU 0"):
        GpuDevice(driver, 0).make_event().record(stream)
    second.destroy_stream(stream)


def test_identities_of_gpus(driver: Driver, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of GPUs without a UUID, for which ROCm has one text."""
    for _ in range(2):
        first, second, again = (GpuDevice(driver, index).uuid for index in (0, 1, 0))
        assert first == again != second
        monkeypatch.setenv("STAND_IN_NO_UUID", "1")
    with pytest.raises(TransportError, match=r"no GPU 2: this process sees 2.*HIP_VISIBLE_DEVICES and ROCR_VISIBLE"):
        GpuDevice(driver, 2)


def test_versions_are_decoded_as_each_library_encodes_them(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver.version == (6, 3)
    library = Library(compile_stand_in("rocm"), RCCL)
    assert library.version == (2, 21, 5) and "RCCL 2.21.5 in " in str(library.error("ncclAllReduce", 1))
    monkeypatch.setenv("STAND_IN_NCCL_VERSION", "21701")
    with pytest.raises(MissingDependencyError, match=r"RCCL 2.17.1 .* is too old: .* ROCm 6.0 or later"):
        Library(compile_stand_in("rocm"), RCCL)


def test_a_missing_library_is_an_error_that_names_what_was_tried_and_the_cure(tmp_path: Path) -> None:
    assert HIP.files == ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so") and RCCL.files[0] == "librccl.so.1"
    for library in (HIP, RCCL):
        absent = dataclasses.replace(library, files=tuple(f"absent-{name}" for name in library.files))
        with pytest.raises(MissingDependencyError) as missing:
            absent.open()
        for words in (f"{library.name} cannot be loaded", *absent.files, "/opt/rocm/lib", "LD_LIBRARY_PATH"):
            assert words in str(missing.value)
        assert ("HVDKIT_NCCL_LIBRARY" in str(missing.value)) == (library is RCCL)
    with pytest.raises(MissingDependencyError, match=r"HIP in .*cuda_nccl.* lacks a function: .*hipInit"):
        HipDriver(compile_stand_in("cuda"))
    (tmp_path / "libamdhip64.so.6").write_text("no library")
    with pytest.raises(MissingDependencyError, match=r"HIP cannot be loaded: .*libamdhip64.so.6"):
        HipDriver(str(tmp_path / "libamdhip64.so.6"))


def test_the_loaded_copy_of_hip_is_used_and_two_are_an_error(tmp_path: Path) -> None:
    """A framework brings its own HIP, and a GPU's streams belong to one copy of it."""
    copies = [tmp_path / name / "libamdhip64.so.7.0" for name in ("first", "second")]
    for copy in copies:
        copy.parent.mkdir()
        copy.write_bytes(Path(compile_stand_in("rocm")).read_bytes())
    code = f"""
import ctypes
from hvdkit.transport.hip import HipDriver
ctypes.CDLL("{copies[0]}")
print(HipDriver().path)
ctypes.CDLL("{copies[1]}")
HipDriver()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(copies[0])
    for words in ("several copies of HIP", *map(str, copies), "HVDKIT_DEVICE_TRANSPORT=host"):
        assert words in done.stderr


def test_the_stand_in_of_hip_has_no_function_of_cuda() -> None:
    """Else a call of CUDA's driver on ROCm would pass the tests above."""
    symbols = subprocess.run(["nm", "-D", compile_stand_in("rocm")], capture_output=True, text=True, check=True).stdout
    assert " T hipSetDevice" in symbols and " T cu" not in symbols
