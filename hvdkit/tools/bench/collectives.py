"""A collective as each peer has it: hvdkit, MPI through mpi4py, Gloo through torch.distributed, and Horovod."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError
from hvdkit.tools.bench.buckets import open_buckets, reduce_buckets
from hvdkit.tools.bench.figures import IN_BUCKET, KINDS, OURS
from hvdkit.tools.bench.horovod_job import HorovodJob
from hvdkit.tools.bench.turns import Call, Turn, time_in_a_row
from hvdkit.world import WITHOUT_MPI, read_world

_MPI_HAS = frozenset({"float32", "float64", "int32", "int64"})


@dataclass(frozen=True)
class Work:
    """A collective of zeros, which stay as they are.

    count: elements of the whole: the vector that is reduced or sent, or what all ranks gather; a multiple of the ranks.
    """

    kind: str
    count: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.count * self.type.itemsize

    @property
    def type(self) -> torch.dtype:
        """The dtype as torch has it."""
        made: torch.dtype = getattr(torch, self.dtype)
        return made


def plan_work(kind: str, nbytes: int, dtype: str, ranks: int) -> Work:
    """The work whose whole is about so many bytes and divides by the ranks."""
    each = max(1, nbytes // (getattr(torch, dtype).itemsize * ranks))
    return Work(kind, each * ranks, dtype)


class Peers:
    """Every peer that can do the work, as turns; opened and closed by all ranks together.

    job: of Horovod's ranks, None to leave it out. alone: hvdkit by itself. notes: who is left out, and why.
    """

    def __init__(self, work: Work, job: HorovodJob | None, *, alone: bool = False) -> None:
        self.turns: dict[str, Turn] = {}
        self.notes: list[str] = []
        self._close: Callable[[], None] = lambda: None
        self._add(OURS, make_named(hvd, work, hvd.size()))
        if work.kind == "allreduce":
            tensor = torch.zeros(work.count, dtype=work.type)
            buckets = open_buckets(tensor)
            self._close = buckets.close
            self._add(IN_BUCKET, lambda: reduce_buckets(buckets, tensor))
        if alone:
            return
        if why := _why_no_mpi(work):
            self.notes.append(why)
        else:
            self._add(*_make_mpi(work))
        self._try("Gloo", _make_gloo(work))
        if job is not None:
            call = functools.partial(job.call, f"{__name__}:time_horovod", work, hvd.size())
            self._try("Horovod", functools.partial(call, 1), lambda count: list(call(count)))

    def close(self) -> None:
        """Give back what the peers hold."""
        hvd.barrier()
        self._close()

    def _add(self, name: str, call: Call) -> None:
        self.turns[name] = functools.partial(time_in_a_row, call, hvd.barrier)

    def _try(self, name: str, call: Call, turn: Turn | None = None) -> None:
        """Add a peer if its first call succeeds: which dtypes and collectives it has is its own affair."""
        failure = ""
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, HvdkitError):
                raise
            failure = str(error).strip().splitlines()[0]
        failures = [each for each in hvd.allgather_object(failure) if each]
        if failures:
            self.notes.append(f"{name} is not compared: {failures[0]}")
        else:
            self.turns[name] = turn or functools.partial(time_in_a_row, call, hvd.barrier)


def make_named(api: Any, work: Work, ranks: int) -> Call:
    """The call with hvdkit or with Horovod, whichever module is given."""
    whole = torch.zeros(work.count, dtype=work.type)
    part = whole[: work.count // ranks].clone()
    name = f"{work.kind}.{work.dtype}.{work.count}"
    calls: dict[str, Call] = {
        "allreduce": lambda: api.allreduce_(whole, name=name, op=api.Sum),
        "allgather": lambda: api.allgather(part, name=name),
        "broadcast": lambda: api.broadcast_(whole, 0, name=name),
        "alltoall": lambda: api.alltoall(whole, name=name),
        "reducescatter": lambda: api.reducescatter(whole, name=name, op=api.Sum),
    }
    assert calls.keys() == set(KINDS)
    return calls[work.kind]


def time_horovod(work: Work, ranks: int, count: int) -> list[float]:
    """The average seconds of a call, of so many in a row; called in a rank of Horovod, where only the calls meet."""
    return time_in_a_row(_horovod_call(work, ranks), lambda: None, count)


@functools.cache
def _horovod_call(work: Work, ranks: int) -> Call:
    import horovod.torch as horovod

    return make_named(horovod, work, ranks)


def _why_no_mpi(work: Work) -> str:
    if read_world().launcher in WITHOUT_MPI:
        return "MPI is not compared: what started the ranks has started no MPI."
    if work.dtype not in _MPI_HAS:
        return f"MPI is not compared: it has no {work.dtype}."
    return ""


def _make_mpi(work: Work) -> tuple[str, Call]:
    """The MPI library's name, and its call."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    whole = torch.zeros(work.count, dtype=work.type).numpy()
    other, part = whole.copy(), whole[: work.count // world.size].copy()
    calls: dict[str, Call] = {
        "allreduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
        "allgather": lambda: world.Allgather(part, whole),
        "broadcast": lambda: world.Bcast(whole, 0),
        "alltoall": lambda: world.Alltoall(whole, other),
        "reducescatter": lambda: world.Reduce_scatter_block(whole, part),
    }
    return MPI.get_vendor()[0], calls[work.kind]


def _make_gloo(work: Work) -> Call:
    whole = torch.zeros(work.count, dtype=work.type)
    other, part = whole.clone(), whole[: work.count // hvd.size()].clone()
    calls: dict[str, Call] = {
        "allreduce": lambda: dist.all_reduce(whole),
        "allgather": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "alltoall": lambda: dist.all_to_all_single(other, whole),
        "reducescatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    return calls[work.kind]
