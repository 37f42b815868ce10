"""Sums of a plan's buckets in the order of the ranks, in float32 or wider: all-to-all, addition here, all-gather.

A backend adds 16-bit numbers in 16 bits, in an order that depends on its algorithm. Here each rank receives all ranks'
numbers of its own shard, adds them by rank, and rounds once. So equal inputs give equal bits in every run.

Order of the operations: a bucket needs two, and all ranks must begin the operations of a group in one order. Therefore
the operations of a bucket begin one after the other, and before those of the bucket that was begun after it; when they
begin depends on the rank, their order does not. On an accelerator they begin at once, because a stream waits for the
all-to-all in place of the host. On the CPU the later ones begin in the first call of advance(), finished() or wait(),
of any bucket, after the all-to-all has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from hvdkit.torch.device.calls import Call, all_to_all, allgather
from hvdkit.torch.device.group import TorchGroup, Work
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.buckets import BucketSpec, Phases
from hvdkit.transport.buffer import HALF, SCALED
from hvdkit.transport.device import Event

#: Begins an operation, and returns it; None if there was only work on the current stream.
Stage = Callable[[], Work | None]


class Exchange:
    """The operations of a bucket, with the methods of a backend's Work, so that TorchGroup.join() takes it.

    order: of the group's operations.
    stages: each begins when the operation of the stage before it has ended.
    """

    def __init__(self, order: Order, stages: Sequence[Stage]) -> None:
        self._order, self._stages = order, deque(stages)
        self._work: Work = None  # of the last stage that has begun; None if it has no operation
        self._begun = False  # all stages have
        self._end: Event | None = None  # of the last stage, if it has no operation

    def begin_stages(self, group: TorchGroup) -> bool:
        """Begin the stages for which the host need not wait; returns whether all have begun."""
        own = group.accelerator
        while self._stages:
            if self._work is not None:
                if own.on_host and not self._work.is_completed():
                    return False
                group.join(self._work)
            self._work = self._stages.popleft()()
        if self._work is None:
            self._end = own.record_event()
        self._begun = True
        return True

    def wait_for_stage(self, limit: timedelta | None) -> None:
        """Block until the operation of the present stage has ended. Raises RuntimeError after the limit, as Work."""
        work = self._work
        if work is not None:
            work.wait(*(() if limit is None else (limit,)))

    def is_completed(self) -> bool:
        """Return whether all operations have ended. Raises what TorchGroup.begin() raises."""
        self._order.advance()
        if not self._begun:
            return False
        return self._end.done() if self._end is not None else bool(self._work.is_completed())

    def wait(self, limit: timedelta | None = None) -> None:
        """Make the current stream wait for the last operation; on the CPU this thread.

        limit: on the CPU, of the wait for one operation; RuntimeError is raised after it.
        """
        while not self._begun:
            self._order.wait_for_stage(limit)
            self._order.advance()
        group = self._order.group
        if self._end is not None:
            group.accelerator.streams.wait(group.accelerator.current_stream(), self._end)
        elif limit is None:
            group.join(self._work)
        else:
            self.wait_for_stage(limit)


class Order:
    """Begins the operations of the exchanges of a group: those of one exchange after those of the one before it.

    group: all its operations must be begun here.
    """

    def __init__(self, group: TorchGroup) -> None:
        self.group = group
        self._waiting: deque[Exchange] = deque()  # not all stages have begun
        self._lock = threading.RLock()
        self._stream = group.accelerator.streams.make_stream(high_priority=True)

    def add(self, stages: Sequence[Stage]) -> Exchange:
        """Begin an exchange behind the present work of the current stream; raises what TorchGroup.begin() raises."""
        own, exchange = self.group.accelerator, Exchange(self, stages)
        own.streams.wait(self._stream, own.record_event())
        with self._lock, own.on_stream(self._stream):
            self._waiting.append(exchange)
            self.advance()
        return exchange

    @torch.no_grad()
    def advance(self) -> bool:
        """Begin the operations for which the host need not wait; returns whether all of an exchange have begun."""
        moved = False
        with self._lock:
            while self._waiting and self._waiting[0].begin_stages(self.group):
                self._waiting.popleft()
                moved = True
        return moved

    @property
    def idle(self) -> bool:
        """Return whether all operations of all exchanges have begun."""
        return not self._waiting

    def wait_for_stage(self, limit: timedelta | None) -> None:
        """Block until the operation has ended behind which the next one begins; raises as Work.wait()."""
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is not None:
            first.wait_for_stage(limit)


class SumsInOrder:
    """The exchanges of the buckets of a plan.

    The memory for received numbers is that of the largest bucket: the next all-to-all begins behind the addition.

    group: the process group of the ranks, see Order.
    specs: the buckets of the plan.
    whole: memory of each bucket, padded to equal shards of the ranks.
    """

    def __init__(self, group: TorchGroup, specs: Sequence[BucketSpec], whole: Sequence[TensorBuffer]) -> None:
        self._group, self._specs = group, specs
        self._order = group.order = group.order or Order(group)
        size, rank = group.size, group.rank
        sums = [DTYPES["float32" if spec.dtype in HALF else spec.dtype] for spec in specs]
        adding = [at for at, spec in enumerate(specs) if self.adds(at)]
        received = group.accelerator.allocate(max((whole[at].nbytes for at in adding), default=0), "uint8").array
        wide = max((whole[at].count // size * sums[at].itemsize for at in adding if specs[at].dtype in HALF), default=0)
        totals = group.accelerator.allocate(wide, "uint8").array
        self._stages: dict[int, tuple[Stage, Stage, Call]] = {}
        for at in adding:
            memory = whole[at].array
            pieces = received[: whole[at].nbytes].view(memory.dtype)
            shards, own = pieces.chunk(size), memory.chunk(size)[rank]
            total = own if specs[at].dtype not in HALF else totals[: own.numel() * sums[at].itemsize].view(sums[at])
            factor = specs[at].prescale * specs[at].postscale
            # No counts: equal parts.
            self._stages[at] = (
                _begins(group, all_to_all(group.backend, memory, pieces, [], [])),
                _adds(shards, total, own, factor),
                allgather(group.backend, own, memory),
            )

    def adds(self, index: int) -> bool:
        """Return whether the numbers of a bucket are added here: a sum of floating-point or complex numbers."""
        spec = self._specs[index]
        return spec.op == "sum" and spec.dtype in SCALED and spec.count > 0

    def begin(self, index: int, phases: Phases, call: Call) -> Exchange:
        """Begin an operation on a bucket. call: the backend's for these phases, where nothing is added here."""
        if not phases.reduce_scatter or not self.adds(index):
            return self._order.add([_begins(self._group, call)])
        send, add, gather = self._stages[index]
        group = self._group

        def add_and_gather() -> Work:
            add()
            return group.begin(gather)

        return self._order.add([send, add_and_gather if phases.all_gather else add])

    def advance(self) -> bool:
        """See Buckets.advance."""
        return self._order.advance()


def _begins(group: TorchGroup, call: Call) -> Stage:
    return lambda: group.begin(call)


def _adds(shards: Sequence[torch.Tensor], total: torch.Tensor, own: torch.Tensor, factor: float) -> Stage:
    def add() -> None:
        total.copy_(shards[0])
        for shard in shards[1:]:  # not torch.sum(), whose order is not documented
            total.add_(shard)
        if factor != 1.0:
            total.mul_(factor)
        if total is not own:
            own.copy_(total)

    return add
