"""The program of every rank of hvdkit bench: it joins the others, and measures beside the peers.

`python -m hvdkit.tools.bench.worker PLAN` is a rank that run.py starts; its rank 0 prints progress and the report.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from hvdkit.config import read_environment
from hvdkit.errors import BenchError
from hvdkit.tools.bench.collectives import Peers, plan_work
from hvdkit.tools.bench.gpus import describe_gpu, take_device
from hvdkit.tools.bench.horovod_job import beside_horovod
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
from hvdkit.tools.bench.timing import interleave, plan_calls
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
    """Measure the plan; collective. The report is the same on all ranks, because the slowest rank's times count."""
    step = plan.kind == "step"
    alone = contextlib.nullcontext((None, list[str]()))
    beside = beside_horovod(plan.threads, plan.device) if step and not plan.alone else alone
    with joined(plan.threads, alone=plan.alone, device=plan.device), beside as (horovod, missing):
        notes, cases = list(missing), []
        machine = {**describe_machine(), **describe_gpu(plan.device)}
        works: Sequence[Model | int] = find_models(plan.models, plan.device) if step else plan.sizes

        def report(number: int, name: str, done: int) -> None:
            progress(name, number * plan.rounds + done, len(works) * plan.rounds)

        for number, work in enumerate(works):
            name = work.name if isinstance(work, Model) else show_bytes(work)
            report(number, name, 0)
            count = functools.partial(report, number, name)
            if isinstance(work, Model):
                steps = StepPeers(work, device=plan.device, alone=plan.alone)
                turns = {**steps.turns, **make_turns(work, plan.device, horovod)}
                times = interleave(turns, dict.fromkeys(turns, STEPS), plan.rounds, count)
                cases.append(Case(name, 0, times, steps.memory))
            else:
                collective = plan_work(plan.kind, work, plan.dtype, hvd.size(), plan.device)
                peers = Peers(collective, alone=plan.alone)
                times = interleave(peers.turns, plan_calls(peers.turns, plan.seconds), plan.rounds, count)
                peers.close()
                cases.append(Case(name, collective.nbytes, times))
                notes += [note for note in peers.notes if note not in notes]
        base, dtype = (NO_COMMUNICATION, "") if step else (OURS, plan.dtype)
        return Report(plan.kind, base, hvd.size(), dtype, hvd.describe(), machine, notes, cases, plan.device)


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
