"""How tests on a GPU count copies: on traces made by hand, and on what profilers write of the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_copies import (
    KNOWN,
    Event,
    check_no_gradient_is_copied,
    read_chrome_trace,
    read_with_jax,
    read_with_tensorflow,
    summarise,
)
from keras_ranks import run_check


def test_a_gradient_that_is_copied_is_found() -> None:
    events = [("MemcpyD2H", KNOWN), ("MemcpyH2D", 192), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0)]
    found = {"gradient": 4 * 256**2, **summarise(events)}
    check_no_gradient_is_copied(found)
    wrong: list[list[Event]] = [[*events, ("MemcpyD2H", 2**20)], [*events, ("Memcpy HtoD (Pinned -> Device)", 2**18)]]
    wrong += [events[1:], events[:-1]]
    for one in wrong:
        with pytest.raises(AssertionError):
            check_no_gradient_is_copied({**found, **summarise(one)})


def test_copies_in_a_trace_of_torch(tmp_path: Path) -> None:
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 4}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 4000}},
        {"cat": "kernel", "name": "ncclDevKernel_Broadcast", "args": {}},
        {"cat": "cuda_runtime", "name": "cudaMemcpyAsync", "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert summarise(read_chrome_trace(tmp_path / "trace.json")) == {"DtoH": [4], "HtoD": [], "nccl": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, read", [("jax", read_with_jax), ("tensorflow", read_with_tensorflow)], ids=["jax", "tensorflow"]
)
def test_copies_in_a_trace_of_xla(package: str, read: Callable[[Path], list[Event]], tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    protobuf = pytest.importorskip("tensorflow.tsl.profiler.protobuf.xplane_pb2", reason="TensorFlow is not installed")
    (tmp_path / "a.xplane.pb").write_bytes(_make_space(protobuf))
    assert summarise(read(tmp_path / "a.xplane.pb")) == {"DtoH": [39892], "HtoD": [192], "nccl": 1}


def _make_space(protobuf: Any) -> bytes:
    """As XLA's collector of CUPTI's events writes it: details of a copy are a text, or refer to one."""
    space = protobuf.XSpace()
    for name in ("/host:CPU", "/device:GPU:0"):
        plane = space.planes.add(name=name)
        texts = ["memcpy_details", "kind_src:device kind_dst:pinned size:39892 dest:0 async:1"]
        for key, text in enumerate(texts, 1):
            plane.stat_metadata[key].id, plane.stat_metadata[key].name = key, text
        for key, text in enumerate(["MemcpyD2H", "MemcpyH2D", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"], 1):
            plane.event_metadata[key].id, plane.event_metadata[key].name = key, text
        line = plane.lines.add(id=1, name="Stream #1")
        line.events.add(metadata_id=1, duration_ps=10).stats.add(metadata_id=1, ref_value=2)
        details = "kind_src:pageable kind_dst:device size:192 dest:0 async:1"
        line.events.add(metadata_id=2, duration_ps=10).stats.add(metadata_id=1, str_value=details)
        line.events.add(metadata_id=3, duration_ps=10)
    encoded: bytes = space.SerializeToString()
    return encoded


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("backend, way", [("torch", "fit"), ("jax", "fit"), ("tensorflow", "tape in a graph")])
def test_on_the_cpu_a_trace_has_no_copies(backend: str, way: str, tmp_path: Path) -> None:
    for found in run_check(2, backend, "gpu_keras:count_copies", "cpu", str(tmp_path), way=way):
        assert (found["place"], found["DtoH"], found["HtoD"], found["nccl"]) == ("cpu", [], [], 0)
