"""What a rank of the scaling model's jobs measures: allreduces in bucket memory, and steps of the MLP.

Started by scaling_model.py on every host; rank 0 writes {"where", "hosts", "points": [Point], "steps": {name: seconds},
"buckets": [bytes], "backward": share of compute}. Times are medians over rounds of the slowest rank's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import hvdkit.torch as hvd
from benchmarks.scaling_fit import Point
from hvdkit.engine import runtime as engine
from hvdkit.engine.planned.plan import TensorSpec, plan_buckets
from hvdkit.tools.bench.models import CPU_MODELS
from hvdkit.transport.between.select import ALGORITHMS, BetweenHosts
from hvdkit.transport.buckets import BucketSpec

ALLREDUCE_BYTES = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_ROUNDS = 4
_TOGETHER_BYTES = 6 << 20  # by calls in a row: much more than a limited wire lets pass at once
_MOST_CALLS = 150
_BACKWARD = 2 / 3  # of a step's compute: twice the multiplications of forward

Key = tuple[str, int]


def _slowest(seconds: float) -> float:
    return float(hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max))


def _measure(calls: dict[Key, Callable[[], object]], counts: dict[Key, int]) -> dict[Key, float]:
    """Seconds of one call each, all of them in turn, round after round."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for turn in range(_ROUNDS + 1):
        for key, call in calls.items():
            hvd.barrier()
            began = time.perf_counter()
            for _ in range(counts[key]):
                call()
            seconds = _slowest((time.perf_counter() - began) / counts[key])
            if turn:  # the first one warms up
                times[key].append(seconds)
    return {key: statistics.median(each) for key, each in times.items()}


def _between() -> BetweenHosts:
    found = engine.runtime("the benchmark").transport.between
    assert found is not None, "these ranks do not talk between hosts; set HVDKIT_TRANSPORT=mpi"
    return found


def _allreduce(algorithm: str, nbytes: int) -> Callable[[], None]:
    transport, between = engine.runtime("the benchmark").transport, _between()
    buckets = transport.open_buckets([BucketSpec("float32", nbytes // 4)])

    def call() -> None:
        between.algorithm = algorithm
        buckets.start(0)
        buckets.wait(0)

    return call


def _step(*, reduced: bool) -> tuple[Callable[[], None], list[int]]:
    """A step of the MLP, and the bytes of its buckets."""
    work = CPU_MODELS[0]
    torch.manual_seed(0)
    model, (inputs, targets) = work.make(), work.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if reduced:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def call() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    tensors = [TensorSpec(name, one.numel(), "float32") for name, one in model.named_parameters()]
    limit = engine.runtime("the benchmark").config.fusion_bytes
    return call, [4 * bucket.data_count for bucket in plan_buckets(tensors, limit)]


def main() -> None:
    """Measure, and write to the file that is named on the command line."""
    torch.set_num_threads(1)
    hvd.init()
    keys = [(algorithm, nbytes) for nbytes in ALLREDUCE_BYTES for algorithm in ALGORITHMS]
    calls: dict[Key, Callable[[], object]] = {key: _allreduce(*key) for key in keys}
    found = _measure(calls, {key: max(1, min(_MOST_CALLS, _TOGETHER_BYTES // key[1])) for key in keys})
    _between().algorithm = "auto"
    alone, _ = _step(reduced=False)
    together, buckets = _step(reduced=True)
    steps = _measure({("compute", 0): alone, ("step", 0): together}, {("compute", 0): 5, ("step", 0): 3})
    where = hvd.describe()
    if hvd.rank() == 0:
        points = [Point(algorithm, hvd.size(), nbytes, found[algorithm, nbytes]) for algorithm, nbytes in keys]
        told = {
            "where": where,
            "hosts": hvd.size(),
            "points": [asdict(one) for one in points],
            "steps": {name: seconds for (name, _), seconds in steps.items()},
            "buckets": buckets,
            "backward": _BACKWARD,
        }
        Path(sys.argv[1]).write_text(json.dumps(told))
    hvd.shutdown()


if __name__ == "__main__":
    main()
