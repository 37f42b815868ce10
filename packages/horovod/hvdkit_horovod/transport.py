"""A process set of Horovod's as a transport: collectives in one order, under generated names, and its buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.engine.api import (
    ALLREDUCE,
    Arithmetic,
    Backoff,
    BucketSpec,
    Buffer,
    Groups,
    InPlaceSegment,
    NumpyArithmetic,
    Op,
    Phases,
    SteppedBuckets,
    Transport,
    make_buffer,
    plan_memory,
    see_as,
)
from hvdkit.errors import TransportError
from hvdkit_horovod.binding import Binding, Call, Request
from hvdkit_horovod.wire import check_wire

#: The operation that this thread is in, as the end of a name; see HorovodTransport.within.
_step = ContextVar("step", default="")


class ProcessSets:
    """Registers process sets with Horovod; all ranks request the same sets in the same order.

    They are kept until shutdown, because Horovod stops everything to remove one. module: Horovod's. size: of the world.
    transports: number of transports that each set has had, by the number of the set.
    """

    def __init__(self, module: Any, size: int) -> None:
        self._known: dict[tuple[int, ...], Any] = {tuple(range(size)): module.global_process_set}
        self._add, self.transports = module.add_process_set, Counter[int]()

    def find(self, ranks: tuple[int, ...]) -> Any:
        """Return Horovod's process set of these ranks; collective over all ranks if it is new."""
        if ranks not in self._known:
            self._known[ranks] = self._add(list(ranks))
        return self._known[ranks]


class HorovodTransport(Transport):
    """See Transport; all ranks of one of Horovod's process sets.

    binding: Horovod's binding.
    sets: the process sets of Horovod.
    ranks: ranks of this set, in the world; this process is one of them.
    this_rank: this process's rank in the world.
    process_set: Horovod's object.
    Operations run in the order of their names, so threads whose operations have different orders on different ranks get
    names of their own by within().
    """

    def __init__(self, binding: Binding, sets: ProcessSets, ranks: Sequence[int], this_rank: int) -> None:
        self.binding, self.ranks, self._sets = binding, tuple(ranks), sets
        self.process_set = sets.find(self.ranks)
        self.rank, self.size = self.ranks.index(this_rank), len(self.ranks)
        self.name = f"horovod ({describe(binding.basics)})"
        self.backend = "mpi" if binding.basics.mpi_enabled() else "gloo" if binding.basics.gloo_enabled() else "none"
        self.arithmetic: Arithmetic = NumpyArithmetic()
        number = self.process_set.process_set_id
        sets.transports[number] += 1
        self._own = f"transport.{number}.{sets.transports[number]}"
        self._counts = Counter[str]()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Give this thread's operations here the name of a call that all ranks make."""
        before = _step.set(f".{name}")
        try:
            yield
        finally:
            _step.reset(before)

    def _make_name(self) -> str:
        prefix = self._own + _step.get()
        self._counts[prefix] += 1
        return f"{prefix}.{self._counts[prefix]}"

    def _do(self, kind: str, buffer: Buffer, **options: Any) -> Any:
        call = Call(kind, self._make_name(), self.process_set, **options)
        return wait(self.binding.start(call, [self.binding.numbers_of(buffer, (buffer.count,), kind)]))[0]

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        if buffer.count:
            self._do("allreduce", buffer, op=op, postscale=scale)

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        return self.binding.buffer_of(self._do("allgather", buffer), buffer)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        if buffer.count:
            self._do("broadcast", buffer, root=self.ranks[root])

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        return self.binding.buffer_of(self._do("alltoall", buffer, splits=list(send_counts)), buffer)

    def barrier(self) -> None:
        self.allreduce(make_buffer(1, "int32"))

    def split(self, groups: Groups) -> HorovodTransport | None:
        """See Transport; the ranks must rise, because Horovod sorts them. Horovod needs all ranks to add each group."""
        me, mine = self.ranks[self.rank], None
        for group in groups:
            ranks = tuple(self.ranks[rank] for rank in group)
            if list(ranks) != sorted(ranks):
                raise TransportError(f"Horovod's core needs a process set's ranks in rising order, not {list(group)}.")
            self._sets.find(ranks)
            if me in ranks:
                mine = HorovodTransport(self.binding, self._sets, ranks, me)
        return mine

    def close(self, *, idle: bool = True) -> None:
        """See Transport; Horovod itself ends with shutdown()."""

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> HorovodBuckets:
        call = Call("allreduce", self._make_name(), self.process_set)
        return HorovodBuckets(self.binding, call, specs, depth, self.arithmetic)


class HorovodBuckets(SteppedBuckets):
    """See Buckets; start() only. Horovod itself reports missing ranks, so nothing monitors the peers here.

    binding: Horovod's binding.
    call: an allreduce, with the prefix of its name.
    specs: the buckets.
    depth: number of memory areas, which the buckets use in turn; None for one a bucket.
    arithmetic: casts to a 16-bit wire dtype, in which Horovod then adds; so the factors of an average are all applied
        before the sum.
    Raises TypeError for a dtype that Horovod's core cannot reduce or send.
    """

    def __init__(
        self, binding: Binding, call: Call, specs: Sequence[BucketSpec], depth: int | None, arithmetic: Arithmetic
    ) -> None:
        super().__init__(check=lambda: None)
        for spec in specs:
            binding.check_reduced("allreduce", spec.dtype)
            check_wire("compression is bf16", spec.dtype, spec.wire)
        pieces = [np.zeros(size, np.uint8) for size in plan_memory(specs, depth)]
        self.depth = len(pieces)
        self.memory = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.owned = self.shard = [(0, 0)] * len(specs)
        self.sent_bytes = sum(memory.nbytes for memory in self.memory)
        self._binding, self._call, self._specs, self._arithmetic = binding, call, specs, arithmetic
        self._narrow = [None if spec.narrow == "none" else make_buffer(spec.count, spec.narrow) for spec in specs]

    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """See SteppedBuckets. Raises TransportError for a single phase."""
        if phases != ALLREDUCE:
            raise TransportError(
                "Horovod's core cannot do reduce_scatter() or all_gather() of a bucket. Use the native engine "
                "(HVDKIT_ENGINE=native), or reduce whole buckets with start()."
            )
        return self._allreduce(index)

    def _allreduce(self, index: int) -> Iterator[bool]:
        spec, buffer, narrow = self._specs[index], self.memory[index], self._narrow[index]
        call = replace(self._call, name=f"{self._call.name}.{index}", op=spec.op)
        if narrow is None:
            call = replace(call, prescale=spec.prescale, postscale=spec.postscale)
        else:
            self._arithmetic.cast(narrow, buffer, spec.prescale * spec.postscale)
        request = self._binding.start(call, [(narrow or buffer).array])
        while not request.done():
            yield True
        request.result()
        if narrow is not None:
            self._arithmetic.cast(buffer, narrow)


def wait(request: Request) -> list[Any]:
    """Wait for an operation and return its results; can be interrupted, unlike Horovod's own wait."""
    backoff = Backoff()
    while not request.done():
        backoff.pause()
    return request.result()


def describe(basics: Any) -> str:
    """Name the libraries by which Horovod sends."""
    parts = ["MPI"] * bool(basics.mpi_enabled()) + ["Gloo"] * bool(basics.gloo_enabled())
    return " and ".join(parts + ["NCCL"] * bool(basics.nccl_built())) or "alone"
