"""A process set of Horovod's as a transport: blocking collectives in one order, under names made up here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from hvdkit.engine.horovod.binding import Binding, Move, Pending
from hvdkit.engine.horovod.buckets import HorovodBuckets
from hvdkit.engine.horovod.operations import flat_of, numbers_of
from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic
from hvdkit.transport.buckets import Buckets, BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.coding.api import Coding
from hvdkit.transport.division import Groups
from hvdkit.transport.polling import Backoff


class Sets:
    """Makes process sets known to Horovod; all ranks ask for the same in the same order.

    everyone: Horovod's set of all `size` ranks. add: Horovod's call, of which the result is kept until shutdown, since
    Horovod stops everything to forget a set.
    """

    def __init__(self, everyone: Any, size: int, add: Callable[[list[int]], Any]) -> None:
        self._known: dict[tuple[int, ...], Any] = {tuple(range(size)): everyone}
        self._add = add
        self._numbers = 0
        #: Its `name` is that of the step which the present thread is in, see HorovodTransport.within.
        self.step = threading.local()

    def find(self, ranks: tuple[int, ...]) -> Any:
        """Horovod's process set of these ranks; collective over all ranks if it is new."""
        if ranks not in self._known:
            self._known[ranks] = self._add(list(ranks))
        return self._known[ranks]

    def number(self) -> int:
        """A number for a transport, the same on all ranks."""
        self._numbers += 1
        return self._numbers


class HorovodTransport(Transport):
    """See Transport; all ranks of one of Horovod's process sets.

    sets: what Horovod knows. ranks: of this one, in the world; this process is one of them. process_set:
    Horovod's object. Operations are done in the order of their names, so steps of several in different orders on
    different ranks get names of their own by within().
    """

    def __init__(self, binding: Binding, sets: Sets, ranks: Sequence[int], this_rank: int) -> None:
        self.binding, self._sets, self._ranks = binding, sets, tuple(ranks)
        self.process_set = sets.find(self._ranks)
        self.rank, self.size = self._ranks.index(this_rank), len(self._ranks)
        self.name = f"horovod ({describe(binding.basics)})"
        self.backend = "mpi" if binding.basics.mpi_enabled() else "gloo" if binding.basics.gloo_enabled() else "none"
        self.arithmetic: Arithmetic = NumpyArithmetic()
        self._own = f"transport.{sets.number()}"
        self._counts: dict[str, int] = {}

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What this thread does here belongs to a step of that name, which all ranks come to."""
        before = getattr(self._sets.step, "name", "")
        self._sets.step.name = name
        try:
            yield
        finally:
            self._sets.step.name = before

    def _name(self) -> str:
        step = getattr(self._sets.step, "name", "")
        place = f"{self._own}.{step}" if step else self._own
        number = self._counts[place] = self._counts.get(place, 0) + 1
        return f"{place}.{number}"

    def _start(self, kind: Any, array: Any, **options: Any) -> Pending:
        return self.binding.start(Move(kind, self._name(), self.process_set, **options), [array])

    def _do(self, kind: Any, array: Any, **options: Any) -> list[Any]:
        return wait(self._start(kind, array, **options))

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """See Transport."""
        self._check_reduced(buffer.dtype)
        if buffer.count:
            self._do("allreduce", numbers_of(buffer, (buffer.count,)), op=op, postscale=scale)

    def _check_reduced(self, dtype: str) -> None:
        if dtype not in self.binding.reduced:
            raise TypeError(f"Horovod's core reduces {', '.join(sorted(self.binding.reduced))}, not {dtype}.")

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """See Transport. Pieces of any length: each rank gets the others' and adds them up."""
        received = self.alltoall(buffer, counts, [counts[self.rank]] * self.size)
        result = make_buffer(counts[self.rank], buffer.dtype)
        pieces = [received.slice(at * result.count, (at + 1) * result.count) for at in range(self.size)]
        self.arithmetic.combine(result, pieces, op)
        return result

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport."""
        gathered = self._do("allgather", numbers_of(buffer, (buffer.count,)))[0]
        return Buffer(flat_of(gathered, buffer.dtype), buffer.dtype)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport."""
        if buffer.count:
            self._do("broadcast", numbers_of(buffer, (buffer.count,)), root=self._ranks[root])

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """See Transport."""
        received = self._do("alltoall", numbers_of(buffer, (buffer.count,)), splits=list(send_counts))[0]
        return Buffer(flat_of(received, buffer.dtype), buffer.dtype)

    def barrier(self) -> None:
        """See Transport."""
        self._do("allreduce", np.zeros(1, np.int32))

    def split(self, groups: Groups) -> Transport | None:
        """See Transport; ranks rise, as Horovod sorts them. Horovod wants all ranks to say each group."""
        me, made = self._ranks[self.rank], None
        for ranks in groups:
            members = tuple(self._ranks[rank] for rank in ranks)
            if list(members) != sorted(members):
                raise TransportError(
                    f"Horovod numbers the ranks of a process set in rising order; {list(ranks)} are not."
                )
            if me in members:
                made = HorovodTransport(self.binding, self._sets, members, me)
            else:
                self._sets.find(members)
                self._sets.number()
        return made

    def open_mailbox(self) -> Any:
        """Horovod has no messages from rank to rank."""
        raise TransportError("Horovod's core has no messages from rank to rank.")

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """See Transport."""
        for spec in specs:
            self._check_reduced(spec.dtype)
            if not isinstance(spec.wire, str):
                refuse_coding(spec.wire)
            if spec.wire == "bfloat16":
                refuse_bfloat16("compression is bf16")
        base = self._name()

        def start(index: int, array: Any, spec: BucketSpec) -> Pending:
            move = Move("allreduce", f"{base}.{index}", self.process_set, spec.op, spec.prescale, spec.postscale)
            return self.binding.start(move, [array])

        return HorovodBuckets(specs, depth, start, self.arithmetic)

    def close(self, *, idle: bool = True) -> None:
        """See Transport; Horovod itself ends with shutdown()."""


def wait(pending: Pending) -> list[Any]:
    """Wait for an operation and return its results; can be interrupted, which Horovod's own waiting cannot."""
    if not pending.done():
        waiting = Backoff()
        while not pending.done():
            waiting.pause()
    return pending.wait()


def refuse_coding(coding: Coding) -> NoReturn:
    """Raise the TypeError for numbers to be coded."""
    raise TypeError(
        f"compression is {coding!r}: Horovod's core, which is the engine here, sends numbers as they are or as "
        f"float16. Use hvd.Compression.fp16, or hvdkit's own engine (HVDKIT_ENGINE=native)."
    )


def refuse_bfloat16(what: str) -> None:
    """Raise the TypeError for bfloat16 to be added. what: would be added so."""
    raise TypeError(
        f"{what}: Horovod's core, which is the engine here, cannot add bfloat16. Use float16 "
        f"(hvd.Compression.fp16), or hvdkit's own engine (HVDKIT_ENGINE=native)."
    )


def describe(basics: Any) -> str:
    """What moves bytes in Horovod."""
    parts = ["MPI"] * bool(basics.mpi_enabled()) + ["Gloo"] * bool(basics.gloo_enabled())
    return " and ".join(parts + ["NCCL"] * bool(basics.nccl_built())) or "alone"
