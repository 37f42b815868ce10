"""What every rank of hvdkit bench runs: it joins, and measures beside the peers.

`python -m hvdkit.tools.bench.worker PLAN` is a rank that run.py starts; its rank 0 prints progress and the report.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from hvdkit.config import read_environment
from hvdkit.errors import BenchError
from hvdkit.tools.bench.collectives import Peers, plan_work
from hvdkit.tools.bench.gpus import describe_gpu, take_device
from hvdkit.tools.bench.horovod_job import HorovodJob, beside_horovod
from hvdkit.tools.bench.horovod_step import make_turns
from hvdkit.tools.bench.models import Model, StepPeers, find_models
from hvdkit.tools.bench.report import (
    CPU,
    LIBRARIES,
    MARK,
    NO_COMMUNICATION,
    OURS,
    STEPS,
    Case,
    Plan,
    Progress,
    Report,
    describe_machine,
    encode_report,
    show_bytes,
)
from hvdkit.tools.bench.timing import count_rounds, interleave, plan_calls
from hvdkit.transport.addresses import address_of, read_interface
from hvdkit.transport.gloo.library import host_store, join_store
from hvdkit.world import read_world


@contextlib.contextmanager
def joined(threads: int, *, alone: bool = False, device: str = CPU) -> Iterator[None]:
    """Initialise hvdkit and, unless alone, torch.distributed on the same ranks; shut the latter down at the end.

    Raises BenchError on a rank that lacks the device.
    """
    torch.set_num_threads(threads)
    hvd.init()
    take_device(device)
    if alone:
        yield
        return
    dist.init_process_group(LIBRARIES[device].lower(), store=_open_store(), rank=hvd.rank(), world_size=hvd.size())
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(plan: Plan, progress: Progress) -> Report:
    """Measure the plan; collective. The report is the same on all ranks, as the slowest rank's times count."""
    alone = contextlib.nullcontext((None, list[str]()))
    beside = alone if plan.alone or plan.kind != "step" else beside_horovod(plan.threads, plan.device)
    with joined(plan.threads, alone=plan.alone, device=plan.device), beside as (horovod, missing):
        notes = list(missing)
        machine = {**describe_machine(), **describe_gpu(plan.device)}
        cases, works = [], _list_works(plan, horovod)
        for number, (name, work) in enumerate(works):
            before, of = number * plan.rounds, len(works) * plan.rounds
            case, more = work(count_rounds(progress, name, plan.rounds, before=before, of=of))
            cases.append(case)
            notes += [note for note in more if note not in notes]
        base, dtype = (NO_COMMUNICATION, "") if plan.kind == "step" else (OURS, plan.dtype)
        return Report(plan.kind, base, hvd.size(), dtype, hvd.describe(), machine, notes, cases, plan.device)


Work = Callable[[Callable[[], object]], tuple[Case, list[str]]]


def _list_works(plan: Plan, horovod: HorovodJob | None) -> list[tuple[str, Work]]:
    """Return the name of each work, and what measures it: its case, and which peers were left out and why."""

    def collective(nbytes: int) -> Work:
        def run(progress: Callable[[], object]) -> tuple[Case, list[str]]:
            work = plan_work(plan.kind, nbytes, plan.dtype, hvd.size(), plan.device)
            peers = Peers(work, alone=plan.alone)
            times = interleave(peers.turns, plan_calls(peers.turns, plan.seconds), plan.rounds, progress)
            peers.close()
            return Case(show_bytes(nbytes), work.nbytes, times), peers.notes

        return run

    def step(model: Model) -> Work:
        def run(progress: Callable[[], object]) -> tuple[Case, list[str]]:
            peers = StepPeers(model, device=plan.device, alone=plan.alone)
            turns = {**peers.turns, **make_turns(model, plan.device, horovod)}
            times = interleave(turns, dict.fromkeys(turns, STEPS), plan.rounds, progress)
            return Case(model.name, 0, times, peers.memory), []

        return run

    if plan.kind == "step":
        return [(model.name, step(model)) for model in find_models(plan.models, plan.device)]
    return [(show_bytes(nbytes), collective(nbytes)) for nbytes in plan.sizes]


def _open_store() -> Any:
    """Open a store on rank 0's host, on the interface that Gloo is configured to use; collective."""
    if hvd.rank() == 0:
        store = host_store()
        interface = read_interface(read_environment())
        name = socket.gethostname() if hvd.cross_size() > 1 else "127.0.0.1"
        hvd.broadcast_object((address_of(interface) if interface else name, store.port))
        return store
    address, port = hvd.broadcast_object(("", 0))
    return join_store(address, port, timeout_s=60.0)


def main(plan: str) -> None:
    """Measure a plan, given as JSON."""
    first = read_world().rank == 0

    def send(message: Mapping[str, object]) -> None:
        if first:
            print(MARK + json.dumps(message), flush=True)

    try:
        report = measure(Plan(**json.loads(plan)), lambda work, done, of: send({"progress": [work, done, of]}))
    except BenchError as error:
        sys.exit(str(error))
    send({"report": encode_report(report)})


if __name__ == "__main__":
    main(sys.argv[1])
