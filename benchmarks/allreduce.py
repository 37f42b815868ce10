"""An allreduce of float32, sizes from 4 KiB to 256 MiB: Open MPI, Gloo, and hvdkit without and with its own memory.

    hvdrun -np 2 python -m benchmarks.allreduce

"hvdkit" is hvd.allreduce_ on an ordinary tensor. "in bucket" is hvdkit with the data in bucket memory, where it is
reduced in place: buckets are started in turn and waited for. Before each call every rank writes its buckets anew, as a
backward pass would, which is not counted.

All peers take turns, a few calls at a time, round after round, so that all of them meet the same machine. The time of a
call is that of the slower rank. The table gives medians over all rounds; ratios are Open MPI's time to hvdkit's, each
taken within its round: above 1, hvdkit is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import hvdkit.torch as hvd
from benchmarks.gloo import join_gloo
from hvdkit.config import parse_bytes
from hvdkit.engine import runtime as engine
from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.base import Buckets, BucketSpec

Call = Callable[[], object]  # a float returned is the seconds of it that do not count

KIB, MIB = 2**10, 2**20
SIZES = [4**n * KIB for n in range(1, 10)]
OURS = ("hvdkit", "in bucket")


def _open_buckets(nbytes: int) -> Buckets:
    made = engine.runtime("the benchmark")
    piece = min(nbytes, made.config.fusion_bytes)
    return made.transport.open_buckets([BucketSpec("float32", piece // 4)] * (nbytes // piece))


def _reduce_buckets(buckets: Buckets, tensor: torch.Tensor) -> float:
    """A round of all buckets; the seconds before it, in which they were filled from a tensor on all ranks."""
    made, flat = engine.runtime("the benchmark"), as_buffer(tensor)
    began, at = time.perf_counter(), 0
    for memory in buckets.memory:
        made.transport.arithmetic.copy(memory, flat.slice(at, at + memory.count))
        at += memory.count
    made.transport.barrier()
    filling = time.perf_counter() - began
    for index in range(len(buckets.memory)):
        buckets.start(index)
    for index in range(len(buckets.memory)):
        buckets.wait(index)
    return filling


def _peers(nbytes: int) -> tuple[dict[str, Call], Callable[[], None]]:
    """The calls to compare, and what gives their memory back. All is zero, and so stays as it is."""
    tensor, buckets = torch.zeros(nbytes // 4), _open_buckets(nbytes)
    array = tensor.numpy()
    peers: dict[str, Call] = {
        "Open MPI": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array),
        "Gloo": lambda: dist.all_reduce(tensor),
        "hvdkit": lambda: hvd.allreduce_(tensor, op=hvd.Sum),
        "in bucket": lambda: _reduce_buckets(buckets, tensor),
    }
    return peers, buckets.close


def measure(nbytes: int, *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds a call of every peer in every round. seconds: about as long a peer's turn takes."""
    peers, close = _peers(nbytes)
    calls = {name: max(1, min(1000, int(seconds / _time(call, 3)))) for name, call in peers.items()}
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, call in peers.items():
            times[name].append(_time(call, calls[name]))
    hvd.barrier()
    close()
    return times


def _time(call: Call, count: int) -> float:
    """Seconds a call on the slower rank, of so many in a row; the same number on all ranks."""
    call()
    hvd.barrier()
    outside, began = 0.0, time.perf_counter()
    for _ in range(count):
        uncounted = call()
        if isinstance(uncounted, float):
            outside += uncounted
    took = time.perf_counter() - began - outside
    return float(hvd.allreduce(torch.tensor(took / count, dtype=torch.float64), op=hvd.Max))


def summarise(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Per peer, the median time in seconds and the median ratio of Open MPI's time to it."""
    base = times["Open MPI"]
    return {
        name: (statistics.median(each), statistics.median(mpi / one for one, mpi in zip(each, base, strict=True)))
        for name, each in times.items()
    }


def _show_size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _show_time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds >= 0.01 else f"{1e6 * seconds:.0f} us"


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1, help="how long a peer's turn in a round takes, about")
    parser.add_argument(
        "--sizes", type=parse_bytes, nargs="+", default=SIZES, help='like "64k 16m"; multiples of 4 MiB'
    )
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    join_gloo()
    where, results = hvd.describe(), {}
    if hvd.rank() == 0:
        print(f"{where}\n\n| size | Open MPI | Gloo | hvdkit | | in bucket | |\n|---|---|---|---|---|---|---|")
    for nbytes in options.sizes:
        results[nbytes] = summary = summarise(measure(nbytes, rounds=options.rounds, seconds=options.seconds))
        cells = [_show_size(nbytes)]
        for name, (seconds, ratio) in summary.items():
            cells += [_show_time(seconds), f"x{ratio:.2f}"] if name in OURS else [_show_time(seconds)]
        if hvd.rank() == 0:
            print(f"| {' | '.join(cells)} |", flush=True)
    if options.json and hvd.rank() == 0:
        options.json.write_text(json.dumps({"where": where, "results": results}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
