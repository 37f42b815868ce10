"""A whole training step, peers side by side: no communication, hvdkit, torch DDP on Gloo, and with Horovod two more.

    hvdrun -np 2 python -m benchmarks.step_time
    hvdrun -np gpu python -m benchmarks.step_time --device cuda

What `hvdkit bench step` measures, with hvdkit's optimizer on Horovod's core too, beside its aims: every rank trains the
same model with each peer in turn, a few steps at a time, round after round. The ranks begin each step together, and the
slower one's time counts. Medians over all rounds, and ratios to the step without communication, each taken within its
round.

On GPUs DDP is on NCCL, steps follow each other without a pause, and Horovod is a peer if it is built with NCCL. This
has not been run yet.
"""

from __future__ import annotations

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.horovod_job import beside_horovod
from hvdkit.tools.bench.horovod_step import make_turns
from hvdkit.tools.bench.models import StepPeers, find_models
from hvdkit.tools.bench.report import CPU, DEVICES, NO_COMMUNICATION, OURS, STEPS, summarise
from hvdkit.tools.bench.timing import interleave
from hvdkit.tools.bench.worker import joined

AIMS = {"MLP, 8 x 1024x1024": 1.05, "small conv net": 1.05, "101 small layers": 1.25}
#: On a GPU, of one rank.
_GPU_AIM = 1.01


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--threads", type=positive_int, default=1, help="threads that each rank computes with")
    parser.add_argument("--only", nargs="*", default=(), help="models whose name contains one of these")
    parser.add_argument("--device", choices=DEVICES, default=CPU)
    options = parser.parse_args()
    threads, device = options.threads, options.device
    with joined(threads, device=device), beside_horovod(threads, device) as (job, notes):
        where, rows = " ".join([hvd.describe() + ".", *notes]), []
        for model in find_models(options.only, device):
            peers = StepPeers(model, device=device)
            turns = {**peers.turns, **make_turns(model, device, job, ours=True)}
            times = interleave(turns, dict.fromkeys(turns, STEPS), options.rounds)
            for peer, figures in summarise(times, NO_COMMUNICATION).items():
                told, met = judge(model.name, peer, figures.ratio)
                rows.append(Row(model.name, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
        finish(rows, where, options.json, first=hvd.rank() == 0)


def judge(model: str, peer: str, ratio: float) -> tuple[str, bool | None]:
    """The aim for a peer in words, and whether it is met. ratio: of its step to the one without communication."""
    if peer != OURS or (model not in AIMS and hvd.size() > 1):
        return "", None
    aim = AIMS.get(model, _GPU_AIM)
    return f"at most x{aim:.2f}", ratio <= aim


if __name__ == "__main__":
    main()
