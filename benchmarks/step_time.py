"""A whole training step, peers side by side: no communication, hvdkit, torch DDP on Gloo, and with Horovod two more.

    hvdrun -np 2 python -m benchmarks.step_time

What `hvdkit bench step` measures, with Horovod as a peer, beside its aims: every rank trains the same model with each
peer in turn, a few steps at a time, round after round. The ranks begin each step together, and the slower one's time
counts. Medians over all rounds, and ratios to the step without communication, each taken within its round.
"""

from __future__ import annotations

import functools
from typing import Any

import hvdkit.torch as hvd
from benchmarks.horovod_job import HorovodJob, joined_with_horovod
from benchmarks.rows import Row, build_parser, finish
from hvdkit.tools.bench.interleave import Turn, interleave, time_each
from hvdkit.tools.bench.plan import NO_COMMUNICATION, OURS, STEPS
from hvdkit.tools.bench.step import MODELS, Model, Step, find_models, make_peers, make_step
from hvdkit.tools.bench.summary import summarise

AIMS = {"MLP, 8 x 1024x1024": 1.05, "small conv net": 1.05, "101 small layers": 1.25}


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads that each rank computes with")
    parser.add_argument("--only", nargs="*", default=(), help="models whose name contains one of these")
    options = parser.parse_args()
    with joined_with_horovod(options.threads) as (job, notes):
        where, rows = " ".join([hvd.describe() + ".", *notes]), []
        for model in find_models(options.only):
            turns = {**make_peers(model), **_make_horovod_peers(model, job)}
            times = interleave(turns, dict.fromkeys(turns, STEPS), options.rounds)
            for peer, figures in summarise(times, NO_COMMUNICATION).items():
                aim = AIMS[model.name]
                told, met = (f"at most x{aim:.2f}", figures.ratio <= aim) if peer == OURS else ("", None)
                rows.append(Row(model.name, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
        finish(rows, where, options.json, first=hvd.rank() == 0)


def _make_horovod_peers(model: Model, job: HorovodJob | None) -> dict[str, Turn]:
    """The turns of Horovod's ranks, warmed up; collective."""
    turns: dict[str, Turn] = {}
    if job is not None:
        for name, function in (("hvdkit on Horovod", "time_on_horovod"), ("Horovod", "time_horovod")):
            call = functools.partial(job.call, f"benchmarks.step_time:{function}", model.name)
            turns[name] = functools.partial(_call, call)
            turns[name](3)
    return turns


def _call(call: Any, steps: int) -> list[float]:
    return list(call(steps))


def time_horovod(name: str, steps: int) -> list[float]:
    """Seconds of each step; called in a rank of Horovod. name: of the model."""
    return time_each(_horovod_step(name, False), _meet, steps)


def time_on_horovod(name: str, steps: int) -> list[float]:
    """The same with hvdkit's optimizer on Horovod's core."""
    return time_each(_horovod_step(name, True), _meet, steps)


@functools.cache
def _horovod_step(name: str, ours: bool) -> Step:
    """A step on Horovod's core, with hvdkit's optimizer or with Horovod's own."""
    import horovod.torch as horovod

    if ours:
        hvd.init(engine="horovod")  # the core that is running already
    wrap = hvd.DistributedOptimizer if ours else horovod.DistributedOptimizer
    return make_step(
        next(model for model in MODELS if model.name == name),
        lambda module, optimizer: (module, wrap(optimizer, module.named_parameters())),
    )


def _meet() -> None:
    """Begin together: Horovod's own barrier lets ranks go up to a cycle apart."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main()
