"""What every rank of hvdkit bench does: join, measure beside the peers, and let rank 0 tell."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from hvdkit.tools.bench.collectives import Peers, plan_work
from hvdkit.tools.bench.figures import NO_COMMUNICATION, OURS, show_bytes
from hvdkit.tools.bench.gloo import join_gloo
from hvdkit.tools.bench.horovod_job import HorovodJob, why_not
from hvdkit.tools.bench.machine import describe_machine
from hvdkit.tools.bench.models import Model, find_models
from hvdkit.tools.bench.plan import STEPS, Plan, Tell
from hvdkit.tools.bench.report import Case, Report
from hvdkit.tools.bench.step import make_peers
from hvdkit.tools.bench.turns import count_rounds, plan_calls, take_turns

Progress = Callable[[], object]


@contextlib.contextmanager
def joined(threads: int, *, alone: bool = False) -> Iterator[tuple[HorovodJob | None, list[str]]]:
    """hvdkit and the peers, begun and ended; yields Horovod's ranks, and who is not there and why."""
    torch.set_num_threads(threads)
    hvd.init()
    if alone:
        yield None, []
        return
    join_gloo()
    missing = why_not()
    job = None if missing else HorovodJob(threads)
    yield job, [missing] if missing else []
    if job is not None:
        job.close()
    dist.destroy_process_group()


def measure(plan: Plan, tell: Tell) -> Report:
    """Measure the plan; collective. The report is the same on all ranks, as times are those of the slowest."""
    with joined(plan.threads, alone=plan.alone) as (job, notes):
        works = _list_works(plan, job)
        cases = []
        for number, (name, work) in enumerate(works):
            before, of = number * plan.rounds, len(works) * plan.rounds
            case, more = work(count_rounds(tell, name, plan.rounds, before=before, of=of))
            cases.append(case)
            notes += [note for note in more if note not in notes]
        base, dtype = (NO_COMMUNICATION, "") if plan.kind == "step" else (OURS, plan.dtype)
        return Report(plan.kind, base, hvd.size(), dtype, hvd.describe(), describe_machine(), notes, cases)


def measure_collective(
    plan: Plan, nbytes: int, job: HorovodJob | None, progress: Progress = lambda: None
) -> tuple[Case, list[str]]:
    """Measure a collective of a size beside all peers; returns its case, and who was left out and why."""
    work = plan_work(plan.kind, nbytes, plan.dtype, hvd.size())
    peers = Peers(work, job, alone=plan.alone)
    times = take_turns(peers.turns, plan_calls(peers.turns, plan.seconds), plan.rounds, progress)
    peers.close()
    return Case(show_bytes(nbytes), work.nbytes, times), peers.notes


def measure_step(
    plan: Plan, model: Model, job: HorovodJob | None, progress: Progress = lambda: None
) -> tuple[Case, list[str]]:
    """Measure a model's step beside all peers; returns as measure_collective does."""
    turns = make_peers(model, job, alone=plan.alone)
    return Case(model.name, 0, take_turns(turns, dict.fromkeys(turns, STEPS), plan.rounds, progress)), []


def _list_works(plan: Plan, job: HorovodJob | None) -> list[tuple[str, Callable[[Progress], tuple[Case, list[str]]]]]:
    """The name of each work, and what measures it."""
    if plan.kind == "step":
        return [(model.name, functools.partial(measure_step, plan, model, job)) for model in find_models(plan.models)]
    return [(show_bytes(nbytes), functools.partial(measure_collective, plan, nbytes, job)) for nbytes in plan.sizes]
