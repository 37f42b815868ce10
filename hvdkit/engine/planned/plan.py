"""The plan: bucket layouts as data, the same on all ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hvdkit.engine.compression import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import STORAGE
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.power_sgd import matrix_shape

_ALIGN = 64  # bytes; each tensor begins at a cache line
_WHOLE_BYTES = 4 * 2**20
_IN_PLACE_BYTES = 32 * 1024


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the plan.

    name: the same on all ranks.
    count: number of elements.
    dtype: of the elements.
    place: number of its device; tensors of one bucket share it.
    layout: the order of its elements, in any words; it must be equal on all ranks, because they add element by element.
    group: number of a group of tensors that are sent only when all of them have arrived; None for no group.
    shape: its dimensions, the dimension with the largest stride first; () if no coding needs it.
    """

    name: str
    count: int
    dtype: str
    place: int = 0
    layout: str = ""
    group: int | None = None
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = f" {'x'.join(map(str, self.shape))}" if len(self.shape) > 1 else ""
        place = f" device {self.place}" if self.place else ""
        group = f" group {self.group}" if self.group is not None else ""
        return f"{self.name} {self.dtype}[{self.count}]{shape}{self.layout and ' '}{self.layout}{place}{group}"


@dataclass(frozen=True)
class Slot:
    """The range of a bucket that holds a tensor, or a slice of a tensor.

    tensor: index of the tensor in the plan.
    start: first element in the bucket.
    stop: end of the range: the element after its last.
    offset: index of the tensor's element at `start`.
    """

    tensor: int
    start: int
    stop: int
    offset: int = 0


def cut_slots(slots: Sequence[Slot], owned: tuple[int, int], itemsize: int) -> list[tuple[Slot, bool]]:
    """Cut slots at the ends of the shard `owned`, (start, stop). Returns each slot, and if it is reduced in place.

    Slots of 32 KiB or more within `owned` are; for smaller slots a copy costs less than the bookkeeping.
    """
    parts = []
    for slot in slots:
        inside = [edge for edge in owned if slot.start < edge < slot.stop]
        for first, last in itertools.pairwise([slot.start, *inside, slot.stop]):
            part = Slot(slot.tensor, first, last, slot.offset + first - slot.start)
            large = (last - first) * itemsize >= _IN_PLACE_BYTES
            parts.append((part, large and owned[0] <= first and last <= owned[1]))
    return parts


@dataclass(frozen=True)
class Bucket:
    """Tensors, and slices of tensors, of one dtype and device that are reduced at once.

    Its memory holds `data_count` elements of tensors, and behind them its used mask: an element a slot, and one more.

    dtype: of its elements.
    slots: the ranges of its tensors, in ascending order.
    data_count: number of elements of tensors and padding.
    needs: the tensors that must have arrived before it starts: its own, and the others of their group.
    wire: dtype or coding of its tensors between hosts.
    """

    dtype: str
    slots: tuple[Slot, ...]
    data_count: int
    needs: frozenset[int]
    wire: Wire = "none"

    @property
    def count(self) -> int:
        """The number of elements, including the used mask."""
        return self.data_count + len(self.slots) + 1

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges (start, stop) of padding between tensors; padding keeps arbitrary values."""
        pairs = itertools.pairwise(self.slots)
        return [(slot.stop, after.start) for slot, after in pairs if slot.stop < after.start]

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.data_count * STORAGE[self.dtype].itemsize

    @property
    def wire_bytes(self) -> int:
        """The bytes of its tensors between hosts in the wire dtype; a coding is not taken into account."""
        dtype = self.wire if isinstance(self.wire, str) and self.wire != "none" else self.dtype
        return self.data_count * STORAGE[dtype].itemsize


@dataclass(frozen=True)
class Plan:
    """A bucket layout. tensors: in the same order on all ranks. buckets: in the order in which they start."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]

    def buckets_needing(self) -> list[list[int]]:
        """Return for each tensor the buckets that cannot start without it, in ascending order."""
        needing: list[list[int]] = [[] for _ in self.tensors]
        for index, bucket in enumerate(self.buckets):
            for tensor in bucket.needs:
                needing[tensor].append(index)
        return needing

    def divide_tensors(self, present: AbstractSet[int]) -> list[list[int]]:
        """Return the tensors in lists, one a bucket in order: the tensors that begin in this bucket.

        present: the tensors that this rank has; a list without any of them is merged into the next list, or the last.
        """
        lists: list[list[int]] = []
        waiting: list[int] = []
        for bucket in self.buckets:
            waiting += [slot.tensor for slot in bucket.slots if not slot.offset]
            if not present.isdisjoint(waiting):
                lists.append(waiting)
                waiting = []
        if waiting:
            lists = [*lists[:-1], [*(lists[-1] if lists else ()), *waiting]]
        return lists or [[]]

    def lists_of_last_use(self, lists: Sequence[Sequence[int]], depth: int) -> list[int]:
        """Return for each tensor the list after whose arrival it is not read any more; the last list drains all.

        lists: see divide_tensors(). depth: maximum number of buckets that are started and not drained.
        """
        number_of = {tensor: number for number, tensors in enumerate(lists) for tensor in tensors}
        starts = list(
            itertools.accumulate((max(number_of[tensor] for tensor in bucket.needs) for bucket in self.buckets), max)
        )
        starts += [len(lists) - 1] * depth
        last = [len(lists) - 1] * len(self.tensors)
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                last[slot.tensor] = starts[index + depth]
        return last

    def name(self, bucket: int | None = None) -> str:
        """Name the first three tensors of a bucket, or of the plan, for a message."""
        indices = range(len(self.tensors)) if bucket is None else [slot.tensor for slot in self.buckets[bucket].slots]
        more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
        return ", ".join(self.tensors[index].name for index in indices[:3]) + more

    def names_of_slots(self, bucket: int) -> list[str]:
        """Return the timeline's name of each slot of a bucket: the tensor, with the range of its elements if cut."""
        names = []
        for slot in self.buckets[bucket].slots:
            tensor, count = self.tensors[slot.tensor], slot.stop - slot.start
            part = "" if count == tensor.count else f"[{slot.offset}:{slot.offset + count}]"
            names.append(f"gradients.{tensor.name}{part}")
        return names

    def specs(self, factors: tuple[float, float], chunk_bytes: int, algorithm: str) -> list[BucketSpec]:
        """Make the BucketSpec of each bucket, for the transport. factors: prescale and postscale."""
        return [
            BucketSpec(
                bucket.dtype,
                bucket.count,
                "sum",
                *factors,
                bucket.wire,
                exact=bucket.count - bucket.data_count,
                chunk_bytes=chunk_bytes,
                algorithm=algorithm,
                matrices=self._matrices(bucket),
            )
            for bucket in self.buckets
        ]

    def _matrices(self, bucket: Bucket) -> tuple[Matrix, ...]:
        """Return the bucket's tensors as matrices for a coding of matrices; () for any other wire."""
        if isinstance(bucket.wire, str) or not bucket.wire.of_matrices:
            return ()
        return tuple(Matrix(slot.start, *matrix_shape(self.tensors[slot.tensor].shape)) for slot in bucket.slots)


#: Properties that the tensors of a bucket share: dtype, place, group and wire.
_Kind = tuple[str, int, int | None, Wire]


def plan_buckets(
    tensors: Sequence[TensorSpec], limit_bytes: int, wires: Sequence[Wire] | None = None
) -> tuple[Bucket, ...]:
    """Divide tensors into buckets of `limit_bytes`, last tensor first: backward makes gradients in about that order.

    A tensor that does not fit into the rest of a bucket is continued in the next bucket. Each dtype, device, wire and
    group has its own buckets. Buckets are ordered by the last of their tensors to arrive, so that no bucket waits for
    the tensors of a later bucket. With a limit of 0 each tensor begins a bucket, and tensors above 4 MiB are cut.
    wires: wire of each tensor; tensors of one bucket share it. With a coding of matrices tensors are not cut: a tensor
    that does not fit begins the next bucket, and a tensor above the limit has a bucket of its own.
    """
    wires = wires or ["none"] * len(tensors)
    groups: dict[int, set[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.group is not None:
            groups.setdefault(tensor.group, set()).add(index)
    pieces = limit_bytes or _WHOLE_BYTES
    filling: dict[_Kind, list[Slot]] = {}
    buckets: list[Bucket] = []

    def close(kind: _Kind) -> None:
        slots = filling.pop(kind)
        needs = groups[kind[2]] if kind[2] is not None else {slot.tensor for slot in slots}
        buckets.append(Bucket(kind[0], tuple(slots), slots[-1].stop, frozenset(needs), kind[3]))

    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.place, tensor.group, wires[index])
        itemsize = STORAGE[tensor.dtype].itemsize
        step = _ALIGN // itemsize
        room = max(step, pieces // itemsize)
        offset = 0
        while offset < tensor.count or not tensor.count:
            slots = filling.setdefault(kind, [])
            start = -(-slots[-1].stop // step) * step if slots else 0
            whole = not isinstance(kind[3], str) and kind[3].of_matrices
            if whole and slots and start + tensor.count > room:
                close(kind)
                continue
            taken = tensor.count if whole else min(tensor.count - offset, room - start)
            if taken > 0 or not tensor.count:
                slots.append(Slot(index, start, start + taken, offset))
            offset += max(taken, 0)
            if slots[-1].stop + step > room or not limit_bytes:
                close(kind)
            if not tensor.count:
                break
    for kind in list(filling):
        close(kind)
    return tuple(sorted(buckets, key=lambda bucket: -min(bucket.needs)))


def describe_plan(tensors: Sequence[TensorSpec], limit_bytes: int, options: str) -> str:
    """Describe the settings and the tensors, which the ranks must agree on; a line for the settings and each tensor."""
    return "\n".join([f"buckets of {limit_bytes} bytes, {options}", *map(str, tensors)])


def plan_digest(description: str) -> bytes:
    """Return the 32-byte hash of a description."""
    return hashlib.sha256(description.encode()).digest()
