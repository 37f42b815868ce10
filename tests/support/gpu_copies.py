"""Copies between host and GPU, and NCCL's kernels, in the trace of a profiler: torch's, JAX's or TensorFlow's.

An event is its name and, of a copy, its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Event = tuple[str, int]
#: Bytes of a copy to the host that is made in every trace, to show that it has copies with their bytes.
KNOWN = 4 * 9973
_DIRECTIONS = {"DtoH": "DtoH", "D2H": "DtoH", "HtoD": "HtoD", "H2D": "HtoD"}
_COPY = re.compile(r"Memcpy ?(\w+)")
_SIZE = re.compile(r"\bsize:(\d+)")


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """Bytes of every copy, in order, by direction ("DtoH", "HtoD"), and the number of NCCL's kernels ("nccl")."""
    found: dict[str, Any] = {"DtoH": [], "HtoD": [], "nccl": 0}
    for name, nbytes in events:
        copy = _COPY.match(name)
        if copy is not None and copy[1] in _DIRECTIONS:
            found[_DIRECTIONS[copy[1]]].append(nbytes)
        found["nccl"] += name.startswith("nccl")
    return {**found, "DtoH": sorted(found["DtoH"]), "HtoD": sorted(found["HtoD"])}


def check_no_gradient_is_copied(found: dict[str, Any]) -> None:
    """AssertionError if a copy is as large as a gradient. found: see gpu_keras.count_copies()."""
    assert found["nccl"] > 0, found
    assert KNOWN in found["DtoH"], f"the trace has no copies, or not their bytes: {found}"
    assert max(found["DtoH"] + found["HtoD"]) < found["gradient"], found


def read_chrome_trace(path: Path) -> list[Event]:
    """The GPU's events in a trace that torch.profiler has exported."""
    events = json.loads(path.read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("gpu_memcpy", "kernel")]
    return [(event["name"], int(event.get("args", {}).get("bytes", 0))) for event in on_gpu]


def read_with_jax(path: Path) -> list[Event]:
    """The GPU's events in an *.xplane.pb, which JAX and TensorFlow write; read by JAX."""
    import jax

    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [(event.name, _size(dict(event.stats).get("memcpy_details"))) for line in lines for event in line.events]


def read_with_tensorflow(path: Path) -> list[Event]:
    """The same, read by TensorFlow."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    events = []
    for plane in space.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        names = {key: one.name for key, one in plane.stat_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            # A text that comes often is the name of a kind of statistics, which the value refers to.
            details = [
                stat.str_value or names.get(stat.ref_value, "")
                for stat in event.stats
                if names[stat.metadata_id] == "memcpy_details"
            ]
            events.append((plane.event_metadata[event.metadata_id].name, _size("".join(details))))
    return events


def _size(details: Any) -> int:
    found = _SIZE.search(str(details))
    return int(found[1]) if found else 0


@contextmanager
def traced(backend: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Trace the GPU within; then the dictionary has what summarise() finds. folder: an empty one of this rank."""
    found: dict[str, Any] = {}
    if backend == "torch":
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with torch.profiler.profile(activities=kinds) as profile:
            yield found
        profile.export_chrome_trace(str(folder / "trace.json"))
        found |= summarise(read_chrome_trace(folder / "trace.json"))
    elif backend == "jax":
        import jax

        with jax.profiler.trace(str(folder)):
            yield found
        found |= summarise(read_with_jax(_only(folder)))
    else:
        import tensorflow as tf

        with tf.profiler.experimental.Profile(str(folder)):
            yield found
        found |= summarise(read_with_tensorflow(_only(folder)))


def _only(folder: Path) -> Path:
    (path,) = folder.rglob("*.xplane.pb")
    return path
