"""Which gradients travel together: a pure plan, the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.transport.base import STORAGE

_ALIGN = 64  # bytes; each tensor begins at a cache line


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the plan.

    count: elements. place: a number for the memory it lies in (a device, say); tensors of one bucket share it.
    layout: how its elements are ordered, in any words; ranks must agree on it, since they add element by element.
    """

    name: str
    count: int
    dtype: str
    place: int = 0
    layout: str = ""

    def __str__(self) -> str:
        place = f" place {self.place}" if self.place else ""
        return f"{self.name} {self.dtype}[{self.count}]{self.layout and ' '}{self.layout}{place}"


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket. tensor: its index among those planned. start, stop: elements."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and place that are reduced at once.

    Its memory holds `data_count` elements of tensors, then one element a slot that says whether the tensor is present
    (1) or absent (0) on this rank; after a sum it is 0 just where no rank has the tensor.
    """

    dtype: str
    slots: tuple[Slot, ...]
    data_count: int

    @property
    def count(self) -> int:
        """Elements in all."""
        return self.data_count + len(self.slots)


def plan_buckets(tensors: Sequence[TensorSpec], limit_bytes: int) -> tuple[Bucket, ...]:
    """Group tensors, last one first (backward makes gradients in about that order), up to `limit_bytes` a bucket.

    A tensor above the limit gets a bucket of its own; a limit of 0 gives one to every tensor. Each dtype and place
    fills buckets of its own; a bucket's turn is that of its last tensor, so it never waits for a later one.
    """
    filling: dict[tuple[str, int], list[Slot]] = {}
    buckets: list[Bucket] = []

    def close(kind: tuple[str, int]) -> None:
        slots = filling.pop(kind)
        buckets.append(Bucket(kind[0], tuple(slots), slots[-1].stop))

    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.place)
        itemsize = STORAGE[tensor.dtype].itemsize
        step = _ALIGN // itemsize
        start = -(-filling[kind][-1].stop // step) * step if kind in filling else 0
        if kind in filling and (start + tensor.count) * itemsize > limit_bytes:
            close(kind)
            start = 0
        filling.setdefault(kind, []).append(Slot(index, start, start + tensor.count))
        if (start + tensor.count) * itemsize >= limit_bytes:
            close(kind)
    for kind in list(filling):
        close(kind)
    return tuple(buckets)


def describe_plan(tensors: Sequence[TensorSpec], limit_bytes: int, options: str) -> str:
    """Write down all that the ranks must agree on, one tensor a line."""
    return "\n".join([f"buckets of {limit_bytes} bytes, {options}", *map(str, tensors)])


def plan_digest(description: str) -> bytes:
    """32 bytes that differ when the description does."""
    return hashlib.sha256(description.encode()).digest()
