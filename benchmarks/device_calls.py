"""What hvdkit's calls for a GPU cost the host, over the tests' stand-in for CUDA's driver and NCCL: Python and ctypes.

    python -m benchmarks.device_calls

One rank. A real driver takes time of its own in each call, so these are the least that they cost. Needs a C compiler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hvdkit
from benchmarks.rows import Row, build_parser, finish
from hvdkit.engine.observe.device_clock import DeviceClock
from hvdkit.engine.observe.observer import DRAINED, FILL, FILLED, REDUCED, STARTED, PlanObserver
from hvdkit.engine.observe.recording import RECORDER, PlanFacts
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import describe_machine, summarise
from hvdkit.torch import gpu
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.gpu_driver import GpuDevice
from hvdkit.transport.nccl.buckets import NcclBuckets
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.single import SingleTransport

_BUCKETS = 20
_NOTHING, _THREE, _EVERY = "nothing", "three events a step", f"every stage of {_BUCKETS} buckets (profile)"


def main() -> None:
    """Measure, and print the table."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=15)
    parser.add_argument("--steps", type=positive_int, default=300, help="of a round")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from stand_in import load_collectives, open_stand_in

    device = open_stand_in()
    steps = {_NOTHING: _step(None), _THREE: _step(device), _EVERY: _step(device)}
    group = DeviceGroup(SingleTransport(), device, load_collectives(), "this rank", 20.0)
    buckets = NcclBuckets(group, [BucketSpec("float32", 1)], _allocate, gpu.scale, lambda: 0)
    bucket = "a bucket of one number, until the stream has it"

    def reduce() -> None:
        buckets.start(0)
        buckets.wait(0)

    times: dict[str, list[float]] = {name: [] for name in (*steps, bucket)}
    for _ in range(options.rounds):
        for name, step in steps.items():
            if name == _EVERY:
                RECORDER.start()
            times[name].append(_time(step, options.steps))
            if name == _EVERY:
                RECORDER.stop()
                RECORDER.take()
        times[bucket].append(_time(reduce, options.steps))
    group.close()
    rows = [Row(name, "host", figures.median_s) for name, figures in summarise(times, _NOTHING).items()]
    machine = describe_machine()
    finish(rows, f"hvdkit {hvdkit.__version__}, {machine['processor']}, {machine['cores']} cores", options.json)


def _step(device: GpuDevice | None) -> Callable[[], None]:
    """What a step tells the observer of its buckets, and what this reads of earlier steps."""
    names = tuple(map(str, range(_BUCKETS)))
    facts = PlanFacts("plan", (0,), (4,) * _BUCKETS, (4,) * _BUCKETS, names, threaded=False)
    clock = None if device is None else DeviceClock(device, lambda: 0)
    observer = PlanObserver(facts, [[name] for name in names], device=clock, measured=lambda *_: None)

    def step() -> None:
        for bucket in range(_BUCKETS):
            for kind in (FILL, FILLED, STARTED):
                observer.event(kind, bucket)
        observer.finishing()
        for bucket in range(_BUCKETS):
            for kind in (REDUCED, DRAINED):
                observer.event(kind, bucket)
        observer.round_ended(0, 0.0)

    return step


def _allocate(count: int, dtype: str) -> TensorBuffer:
    return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype]), dtype)


def _time(step: Callable[[], None], count: int) -> float:
    """Seconds a call."""
    step()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
