"""An allreduce of float32, 16 to 256 MiB: hvdkit, in bucket memory and not, Open MPI, Gloo, Horovod, and mere copies.

    hvdrun -np 2 python -m benchmarks.allreduce

What `hvdkit bench allreduce` measures, with Horovod as a peer, beside its aims. "in bucket" is hvdkit with the data in
bucket memory, where it is reduced in place, as gradients are. "two copies" copies as many bytes twice, on all ranks at
once: what the memory itself takes to bring the sum to and fro. Ratios are of the peer's time to that in bucket, each
within its round.
"""

from __future__ import annotations

import functools

import torch

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int, positive_seconds
from hvdkit.setting import parse_bytes
from hvdkit.tools.bench.collectives import Peers, Work, make_named, plan_work
from hvdkit.tools.bench.horovod_job import HorovodJob, beside_horovod
from hvdkit.tools.bench.report import IN_BUCKET, show_bytes, summarise
from hvdkit.tools.bench.timing import Call, interleave, plan_calls, time_in_a_row
from hvdkit.tools.bench.worker import joined

COPIES = "two copies"
SIZES = [parse_bytes(size) for size in ("16m", "64m", "256m")]
#: How many times as long as in bucket the peers are to take, at least.
AIMS = {"Open MPI": 3.0, "Gloo": 4.0, "Horovod": 4.0}
_COPIES_AIM = 2.0


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument(
        "--seconds", type=positive_seconds, default=0.1, help="how long a peer's turn in a round takes, about"
    )
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=SIZES, help='like "64k 16m"')
    options = parser.parse_args()
    with joined(threads=1), beside_horovod(threads=1) as (job, notes):
        where, rows = " ".join([hvd.describe() + ".", *notes]), []
        for nbytes in options.sizes:
            work = plan_work("allreduce", nbytes, "float32", hvd.size())
            peers = Peers(work)
            _add_horovod(peers, work, job)
            source, target = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
            copies = functools.partial(_copy_twice, source, target)
            peers.turns[COPIES] = functools.partial(time_in_a_row, copies, hvd.barrier)
            times = interleave(peers.turns, plan_calls(peers.turns, options.seconds), options.rounds)
            peers.close()
            for peer, figures in summarise(times, IN_BUCKET).items():
                aim, met = judge(peer, figures.ratio)
                rows.append(Row(show_bytes(nbytes), peer, figures.median_s, figures.ratio, IN_BUCKET, aim, met))
        finish(rows, where, options.json, first=hvd.rank() == 0)


def time_horovod(work: Work, ranks: int, count: int) -> list[float]:
    """The average seconds of a call, of so many in a row; called in a rank of Horovod, where only the calls meet."""
    return time_in_a_row(_horovod_call(work, ranks), lambda: None, count)


@functools.cache
def _horovod_call(work: Work, ranks: int) -> Call:
    import horovod.torch as horovod

    return make_named(horovod, work, ranks)


def _add_horovod(peers: Peers, work: Work, job: HorovodJob | None) -> None:
    if job is not None:
        call = functools.partial(job.call, "benchmarks.allreduce:time_horovod", work, hvd.size())
        peers.try_peer("Horovod", functools.partial(call, 1), lambda count: list(call(count)))


def judge(peer: str, ratio: float) -> tuple[str, bool | None]:
    """The aim for a peer in words, and whether it is met. ratio: of its time to that in bucket."""
    if peer == COPIES:
        return f"at least x{1 / _COPIES_AIM:g}", ratio >= 1 / _COPIES_AIM
    if peer not in AIMS:
        return "", None
    return f"at least x{AIMS[peer]:g}", ratio >= AIMS[peer]


def _copy_twice(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
    source.copy_(target)


if __name__ == "__main__":
    main()
