"""Collectives as each peer runs them: hvdkit, MPI through mpi4py, and hvdkit, Gloo or NCCL in torch.distributed."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import hvdkit.torch as hvd
from hvdkit.engine import runtime as engine
from hvdkit.errors import HvdkitError
from hvdkit.tools.bench.gpus import find_clock
from hvdkit.tools.bench.report import AS_BACKEND, CPU, IN_BUCKET, KINDS, LIBRARIES, OURS
from hvdkit.tools.bench.timing import Call, Turn, time_in_a_row
from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.buckets import Buckets, BucketSpec
from hvdkit.world import WITHOUT_MPI, read_world

_MPI_DTYPES = frozenset({"float32", "float64", "int32", "int64"})


@dataclass(frozen=True)
class Work:
    """A collective on zeros, which stay zeros in a sum.

    kind: name of the collective.
    count: number of elements of the full tensor, which is reduced, sent, or gathered from all ranks; a multiple of the
        number of ranks.
    dtype: dtype of the elements.
    device: "cpu", or "cuda" for the current GPU.
    """

    kind: str
    count: int
    dtype: str
    device: str = CPU

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.count * self.type.itemsize

    @property
    def type(self) -> torch.dtype:
        """The torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def zeros(self) -> torch.Tensor:
        """Make the full tensor."""
        return torch.zeros(self.count, dtype=self.type, device=self.device)


def plan_work(kind: str, nbytes: int, dtype: str, ranks: int, device: str = CPU) -> Work:
    """Plan a collective of about `nbytes` bytes whose count is a multiple of the number of ranks.

    kind: name of the collective.
    nbytes: bytes of the full tensor.
    dtype: dtype of the elements.
    ranks: number of ranks.
    device: "cpu" or "cuda".
    """
    each = max(1, nbytes // (getattr(torch, dtype).itemsize * ranks))
    return Work(kind, each * ranks, dtype, device)


class Peers:
    """Every peer that can run the collective, as turns; opened and closed by all ranks together.

    alone: only hvdkit. notes: which peers are left out, and why. On GPUs MPI is left out.
    """

    def __init__(self, work: Work, *, alone: bool = False) -> None:
        self.turns: dict[str, Turn] = {}
        self.notes: list[str] = []
        self._clock = find_clock(work.device)
        self._opened = contextlib.ExitStack()
        self._add(OURS, make_named(hvd, work, hvd.size()))
        if work.kind == "allreduce" and work.device == CPU:
            tensor = work.zeros()
            buckets = open_buckets(tensor)
            self._opened.callback(buckets.close)
            self._add(IN_BUCKET, lambda: reduce_buckets(buckets, tensor))
        if alone:
            return
        if work.device == CPU:
            group = dist.new_group(backend="hvdkit")
            self._opened.callback(dist.destroy_process_group, group)
            self._add(AS_BACKEND, _make_distributed(work, group))
            if reason := _why_no_mpi(work):
                self.notes.append(reason)
            else:
                self._add(*_make_mpi(work))
        self.try_peer(LIBRARIES[work.device], _make_distributed(work))

    def close(self) -> None:
        """Release the peers' memory."""
        hvd.barrier()
        self._opened.close()

    def _add(self, name: str, call: Call) -> None:
        self.turns[name] = functools.partial(time_in_a_row, call, hvd.barrier, clock=self._clock)

    def try_peer(self, name: str, call: Call, turn: Turn | None = None) -> None:
        """Add a peer if its first call succeeds on all ranks; collective.

        Peers lack some dtypes and collectives.
        """
        failure = ""
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, HvdkitError):
                raise
            failure = str(error).strip().splitlines()[0]
        failures = [each for each in hvd.allgather_object(failure) if each]
        if failures:
            self.notes.append(f"{name} is left out: {failures[0]}")
        elif turn is not None:
            self.turns[name] = turn
        else:
            self._add(name, call)


def make_named(api: Any, work: Work, ranks: int) -> Call:
    """Make the call with hvdkit.torch, or with another module that has Horovod's names."""
    whole = work.zeros()
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


def open_buckets(tensor: torch.Tensor) -> Buckets:
    """Open buckets of the configured size for all bytes of the tensor; collective, and so is closing them."""
    runtime, buffer = engine.runtime("the benchmark"), as_buffer(tensor)
    piece = max(1, runtime.config.fusion_bytes // buffer.array.itemsize)
    counts = [min(piece, buffer.count - at) for at in range(0, buffer.count, piece)]
    return runtime.transport.open_buckets([BucketSpec(buffer.dtype, count) for count in counts])


def reduce_buckets(buckets: Buckets, tensor: torch.Tensor) -> float:
    """Fill all buckets from the tensor, as a backward pass does, and reduce them; returns the seconds of filling."""
    runtime, buffer = engine.runtime("the benchmark"), as_buffer(tensor)
    start, at = time.perf_counter(), 0
    for memory in buckets.memory:
        runtime.transport.arithmetic.copy(memory, buffer.slice(at, at + memory.count))
        at += memory.count
    runtime.transport.barrier()
    filling = time.perf_counter() - start
    for index in range(len(buckets.memory)):
        buckets.start(index)
    for index in range(len(buckets.memory)):
        buckets.wait(index)
    return filling


def _why_no_mpi(work: Work) -> str:
    if read_world().launcher in WITHOUT_MPI:
        return "MPI is not measured: the launcher of these ranks starts no MPI."
    if work.dtype not in _MPI_DTYPES:
        return f"MPI is not measured: it has no type {work.dtype}."
    return ""


def _make_mpi(work: Work) -> tuple[str, Call]:
    """Return the MPI library's name, and its call."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    whole = work.zeros().numpy()
    other, part = whole.copy(), whole[: work.count // world.size].copy()
    calls: dict[str, Call] = {
        "allreduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
        "allgather": lambda: world.Allgather(part, whole),
        "broadcast": lambda: world.Bcast(whole, 0),
        "alltoall": lambda: world.Alltoall(whole, other),
        "reducescatter": lambda: world.Reduce_scatter_block(whole, part),
    }
    return MPI.get_vendor()[0], calls[work.kind]


def _make_distributed(work: Work, group: dist.ProcessGroup | None = None) -> Call:
    whole = work.zeros()
    other, part = whole.clone(), whole[: work.count // hvd.size()].clone()
    calls: dict[str, Call] = {
        "allreduce": lambda: dist.all_reduce(whole, group=group),
        "allgather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "alltoall": lambda: dist.all_to_all_single(other, whole, group=group),
        "reducescatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }
    return calls[work.kind]
