"""Small allreduces, one at a time and many at once: hvdkit, Gloo (torch.distributed) and Horovod if it is there.

    hvdrun -np 2 python -m benchmarks.collectives

"one" waits for its result; "200 at once" are begun one after the other, in place and each under its name (Gloo has no
names), and then waited for one after the other, as gradients are. Calls follow each other without a pause, so all ranks
are there; the slowest rank's time counts. Ratios are of the peer's time to hvdkit's, each within its round.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int, positive_seconds
from hvdkit.tools.bench.horovod_job import HorovodJob, beside_horovod
from hvdkit.tools.bench.report import OURS, Summary, summarise
from hvdkit.tools.bench.timing import Call, Turn, interleave, plan_calls, time_in_a_row
from hvdkit.tools.bench.worker import joined

_MANY = 200
_ONE_AIM_S = 60e-6
_MANY_AIM = 5.0
#: What is measured: bytes of a tensor, and how many of them.
WORKS = {"one of 4 KiB": (4096, 1), "200 at once of 4 KiB": (4096, _MANY), "200 at once of 256 B": (256, _MANY)}


def _make_named(api: Any, nbytes: int, count: int) -> Call:
    """The call with hvdkit or with Horovod, whichever module is given. All is zero, and so stays as it is."""
    tensors = {f"{nbytes}.{number}": torch.zeros(nbytes // 4) for number in range(count)}

    def one() -> None:
        for name, tensor in tensors.items():
            api.allreduce_(tensor, name=name, op=api.Sum)

    def many() -> None:
        handles = [api.allreduce_async_(tensor, name=name, op=api.Sum) for name, tensor in tensors.items()]
        for handle in handles:
            api.synchronize(handle)

    return one if count == 1 else many


def _make_gloo(nbytes: int, count: int) -> Call:
    tensors = [torch.zeros(nbytes // 4) for _ in range(count)]

    def many() -> None:
        begun = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for one in begun:
            assert one is not None
            one.wait()

    return (lambda: dist.all_reduce(tensors[0])) if count == 1 else many


@functools.cache
def _horovod_call(nbytes: int, count: int) -> Call:
    import horovod.torch as horovod

    return _make_named(horovod, nbytes, count)


def time_horovod(nbytes: int, count: int, calls: int) -> list[float]:
    """Seconds of a call on average; called in a rank of Horovod."""
    return time_in_a_row(_horovod_call(nbytes, count), lambda: None, calls)


def _turns(nbytes: int, count: int, job: HorovodJob | None) -> dict[str, Turn]:
    calls = {OURS: _make_named(hvd, nbytes, count), "Gloo": _make_gloo(nbytes, count)}
    turns: dict[str, Turn] = {name: functools.partial(time_in_a_row, call, hvd.barrier) for name, call in calls.items()}
    if job is not None:
        turns["Horovod"] = functools.partial(job.call, "benchmarks.collectives:time_horovod", nbytes, count)
    return turns


def judge(peer: str, count: int, figures: Summary) -> tuple[str, bool | None]:
    """The aim for a peer in words, and whether it is met: hvdkit's time of one; the peers' ratios of many."""
    if count == 1:
        return (f"under {1e6 * _ONE_AIM_S:g} us", figures.median_s < _ONE_AIM_S) if peer == OURS else ("", None)
    return ("", None) if peer == OURS else (f"at least x{_MANY_AIM:g}", figures.ratio >= _MANY_AIM)


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=11)
    parser.add_argument(
        "--seconds", type=positive_seconds, default=0.2, help="how long a peer's turn in a round takes, about"
    )
    options = parser.parse_args()
    with joined(threads=1), beside_horovod(threads=1) as (job, notes):
        where, rows = " ".join([hvd.describe() + ".", *notes]), []
        for work, (nbytes, many) in WORKS.items():
            turns = _turns(nbytes, many, job)
            times = interleave(turns, plan_calls(turns, options.seconds), options.rounds)
            for peer, figures in summarise(times, OURS).items():
                aim, met = judge(peer, many, figures)
                rows.append(Row(f"allreduce, {work}", peer, figures.median_s, figures.ratio, OURS, aim, met))
        finish(rows, where, options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
