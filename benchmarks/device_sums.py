"""Compares the time of a bucket with device_sums=float32 with that of the library's allreduce, over Gloo.

    hvdrun -np 2 python -m benchmarks.device_sums

Both are buckets of a process group of torch, by Gloo on tensors of the CPU, one at a time. With device_sums=float32 a
bucket has two operations, between which torch adds the numbers. The ratios say nothing about an accelerator's library.
"""

from __future__ import annotations

import functools

import torch

import hvdkit
import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.engine import runtime
from hvdkit.launch.cli.numbers import positive_int, positive_seconds
from hvdkit.setting import parse_bytes
from hvdkit.tools.bench.report import describe_machine, show_bytes, summarise
from hvdkit.tools.bench.timing import Turn, interleave, plan_calls, time_in_a_row
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.groups import DeviceSettings, open_group
from hvdkit.transport.buckets import BucketSpec

_SIZES = [parse_bytes(size) for size in ("64k", "256k", "1m", "4m", "16m")]
_LIBRARY, _FLOAT32 = "library", "float32"


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=9)
    parser.add_argument("--seconds", type=positive_seconds, default=0.1, help="how long a turn in a round takes, about")
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=_SIZES, help='like "64k 16m"')
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init(device_transport="torch")
    if hvd.size() == 1:
        parser.error("one rank reduces nothing: start it with hvdrun -np 2")
    rows = []
    for nbytes in options.sizes:
        plans = {sums: _open(options.dtype, nbytes, sums) for sums in (_LIBRARY, _FLOAT32)}
        turns: dict[str, Turn] = {
            sums: functools.partial(time_in_a_row, functools.partial(_reduce, plan), hvd.barrier)
            for sums, plan in plans.items()
        }
        times = interleave(turns, plan_calls(turns, options.seconds), options.rounds)
        for sums, each in summarise(times, _LIBRARY).items():
            rows.append(Row(show_bytes(nbytes), sums, each.median_s, each.ratio, _LIBRARY))
        for plan in plans.values():
            plan.close()
    machine = describe_machine()
    where = f"hvdkit {hvdkit.__version__}, torch {torch.__version__}, {machine['processor']}, {machine['cores']} cores"
    finish(rows, f"{where}, {hvd.size()} ranks, Gloo, {options.dtype}", options.json, first=hvd.rank() == 0)
    hvd.shutdown()


def _open(dtype: str, nbytes: int, sums: str) -> TorchBuckets:
    transport = runtime.runtime("A benchmark").transport
    # A group for each, because all operations of a group are in the order of its sums.
    group = open_group(transport, torch.device("cpu"), DeviceSettings("torch"), f"{sums} of {nbytes}")
    assert group is not None
    count = nbytes // (4 if dtype == "float32" else 2)
    return TorchBuckets(group, [BucketSpec(dtype, count, postscale=1 / hvd.size())], sums)


def _reduce(plan: TorchBuckets) -> None:
    plan.start(0)
    plan.wait(0)


if __name__ == "__main__":
    main()
