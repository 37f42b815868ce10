"""NCCL's communicators, streams and events, over a stand-in in host memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import nccl_checks
import pytest
from pipe_ranks import run_piped
from ranks import run_ranks
from stand_in import ask_to_fail, find_compiler, stand_in_path

from hvdkit.errors import MissingDependencyError, TransportError
from hvdkit.torch.device.host import HostDevice
from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import make_buffer
from hvdkit.transport.cuda import CudaDriver, load_driver
from hvdkit.transport.gpu_driver import DriverError, GpuDevice
from hvdkit.transport.nccl.buckets import NcclBuckets
from hvdkit.transport.nccl.group import DeviceGroup, describe_slow
from hvdkit.transport.nccl.library import NCCL, Library, find_library

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"),
]

PAUSES = {"STAND_IN_PAUSE_US": "3000"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int) -> None:
    run_ranks(size, nccl_checks.collectives, transport="single" if size == 1 else "shared_memory")


@pytest.mark.parametrize("check", [nccl_checks.messages, nccl_checks.order])
def test_whatever_is_late(check: Callable[[Transport], None]) -> None:
    run_ranks(3, check, transport="shared_memory", env=PAUSES)


def test_a_killed_rank_is_noticed_and_what_waits_for_it_is_ended() -> None:
    assert run_piped(3, nccl_checks.a_rank_dies) == [True, True, None]


def test_a_failure_says_what_where_and_what_to_do() -> None:
    for rank, said in enumerate(run_ranks(2, nccl_checks.failures, transport="shared_memory", fresh=True)):
        reduce, closed, connecting = said
        assert f"ncclAllReduce failed on rank {rank} on " in reduce and "GPU 0: unhandled cuda error" in reduce
        assert "NCCL_DEBUG=INFO" in reduce
        assert "has been closed" in closed
        assert ("invalid usage" if rank == 0 else "one of the 2 ranks has not called it") in connecting


def test_a_failure_of_cuda_is_what_a_group_says_from_then_on() -> None:
    for rank, said in enumerate(run_ranks(2, nccl_checks.a_group_fails, transport="shared_memory", fresh=True)):
        assert "cuStreamWaitEvent failed" in said[0] and f"operations on rank {rank} on " in said[0]
        assert set(said) == {said[0]}


def test_the_librarys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 99   /a place/nvidia/nccl/lib/libnccl.so.2\n7f02-7f03 rw-p 0 0:0 0\n"
    )
    assert NCCL.mapped(str(maps)) == ["/a place/nvidia/nccl/lib/libnccl.so.2"]
    assert find_library("/my/libnccl.so.2") == "/my/libnccl.so.2"
    wheel = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    code = "from hvdkit.transport.nccl.library import find_library; print(find_library())"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(wheel)


def test_a_library_that_is_missing_or_too_old_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependencyError, match="pip install nvidia-nccl-cu13"):
        Library("/no/such/libnccl.so.2")
    monkeypatch.setenv("STAND_IN_NCCL_VERSION", "21701")
    with pytest.raises(MissingDependencyError, match=r"NCCL 2.17.1 .* is too old: hvdkit needs 2.18.1"):
        Library(stand_in_path())
    with pytest.raises(MissingDependencyError, match="nvidia-smi"):
        CudaDriver("/no/such/libcuda.so.1")


def test_a_device_that_is_not_there_and_one_without_memory() -> None:
    driver = load_driver(stand_in_path())
    with pytest.raises(TransportError, match="no GPU 3: this process sees 1"):
        GpuDevice(driver, 3)
    device = GpuDevice(driver, 0)
    ask_to_fail("cuEventCreate", 2)
    with pytest.raises(DriverError, match=r"GPU 0: out of memory .* smaller batch"):
        device.make_event()
    assert device.make_event().done()


def test_events_measure_on_both_kinds_of_device() -> None:
    for device in (GpuDevice(load_driver(stand_in_path()), 0), HostDevice()):
        stream = device.make_stream()
        first, last = device.make_event(timing=True), device.make_event(timing=True)
        first.record(stream)
        last.record(stream)
        last.synchronize()
        assert last.done() and last.elapsed_ms(first) >= 0.0
        device.destroy_stream(stream)


def a_rank_dies(transport: Transport) -> tuple[str, str]:
    """The last rank is killed while the others reduce a bucket, and wait for it on the device."""
    group = nccl_checks.connect_group(transport)
    arithmetic = NumpyArithmetic()
    buckets = NcclBuckets(
        group,
        [BucketSpec("float32", 1000)],
        make_buffer,
        lambda buffer, factor: arithmetic.combine(buffer, [buffer], scale=factor),
        lambda: 0,
    )
    buckets.memory[0].array[:] = 1.0
    buckets.start(0)
    buckets.wait(0)
    group.wait_for_stream()
    assert buckets.memory[0].array.tolist() == [3.0] * 1000
    if transport.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    buckets.start(0)
    buckets.wait(0)  # comes back when the group has failed; the bucket is undefined
    with pytest.raises(TransportError) as later:
        for _ in range(100):
            buckets.start(0)
            buckets.wait(0)
            time.sleep(0.1)
    group.close()
    return str(later.value), group.where


def test_a_killed_rank_ends_the_wait_of_the_others() -> None:
    *others, killed = run_piped(3, a_rank_dies)
    assert killed is None
    for message, where in others:
        assert f"NCCL's operations on {where} were ended" in message


def test_slow_operations_name_those_beside_them() -> None:
    group, other = (mock.Mock(spec=DeviceGroup, where="rank 0 on node1, GPU 0", library="NCCL") for _ in range(2))
    group.name, other.name = "optimizer.1", "the common communicator"
    assert "different orders" not in describe_slow(group, [], 61.2)
    text = describe_slow(group, [other], 61.2)
    assert "of optimizer.1 on rank 0 on node1, GPU 0 have been under way for 61 s" in text
    assert "Those of the common communicator are under way on this GPU too" in text and "different orders" in text
