"""Small allreduces, one at a time and many at once: hvdkit, Gloo (torch.distributed) and Horovod if it is there.

    hvdrun -np 2 python -m benchmarks.collectives

"one" waits for its result; "200 at once" are begun one after the other, in place and each under its name (Gloo has no
names), and then waited for one after the other, as gradients are. Calls follow each other without a pause, so all ranks
are there; the slowest rank's time counts.

All peers take turns, round after round, so that all of them meet the same machine; Horovod's ranks are processes of
their own, which stand still while the others have their turn. The table gives medians over all rounds, and how many
times faster hvdkit is, each ratio taken within its round. The aim is 5.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from benchmarks.gloo import join_gloo
from benchmarks.horovod_job import HorovodJob, why_not

Call = Callable[[], object]
Turn = Callable[[int], float]  # so many calls in a row; the seconds that one took on this rank, on average

_MANY = 200
_AIM = 5.0
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


def _time(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


@functools.cache
def _horovod_call(nbytes: int, count: int) -> Call:
    import horovod.torch as horovod

    return _make_named(horovod, nbytes, count)


def time_horovod(nbytes: int, count: int, calls: int) -> float:
    """Seconds of a call on average; called in a rank of Horovod."""
    return _time(_horovod_call(nbytes, count), calls)


def _turns(nbytes: int, count: int, job: HorovodJob | None) -> dict[str, Turn]:
    ours, gloo = _make_named(hvd, nbytes, count), _make_gloo(nbytes, count)
    turns: dict[str, Turn] = {"hvdkit": lambda calls: _time(ours, calls), "Gloo": lambda calls: _time(gloo, calls)}
    if job is not None:
        turns["Horovod"] = lambda calls: job.call("benchmarks.collectives:time_horovod", nbytes, count, calls)
    return turns


def _slowest(seconds: float) -> float:
    return float(hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max))


def measure(turns: dict[str, Turn], *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds a call of every peer in every round. seconds: about as long a peer's turn takes."""
    calls = {}
    for name, turn in turns.items():
        turn(3)
        calls[name] = max(3, min(1000, int(seconds / _slowest(turn(5)))))
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            hvd.barrier()
            times[name].append(_slowest(turn(calls[name])))
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Per peer, the median time in seconds and the median ratio of it to hvdkit's."""
    ours = times["hvdkit"]
    return {
        name: (statistics.median(each), statistics.median(one / own for one, own in zip(each, ours, strict=True)))
        for name, each in times.items()
    }


def _show_time(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds >= 0.001 else f"{1e6 * seconds:.0f} us"


def _show_row(work: str, summary: dict[str, tuple[float, float]]) -> str:
    cells = [_show_time(each) + (f" x{ratio:.1f}" if n else "") for n, (each, ratio) in enumerate(summary.values())]
    least = min(ratio for name, (_, ratio) in summary.items() if name != "hvdkit")
    return f"| {work} | {' | '.join(cells)} | x{_AIM:g}{'' if least >= _AIM else ', missed'} |"


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a peer's turn in a round takes, about")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    join_gloo()
    missing = why_not()
    job = None if missing else HorovodJob()
    where = hvd.describe()
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for work, (nbytes, count) in WORKS.items():
        turns = _turns(nbytes, count, job)
        if not results and hvd.rank() == 0:
            print(f"{where}. {missing}\n\n| allreduce | {' | '.join(turns)} | aim |\n|{'---|' * (len(turns) + 2)}")
        results[work] = summary = summarise(measure(turns, rounds=options.rounds, seconds=options.seconds))
        if hvd.rank() == 0:
            print(_show_row(work, summary), flush=True)
    if options.json and hvd.rank() == 0:
        options.json.write_text(json.dumps({"where": where, "results": results}, indent=1))
    if job is not None:
        job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
