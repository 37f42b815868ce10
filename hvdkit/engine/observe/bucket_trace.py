"""The buckets of a plan in the timeline, tensor by tensor: filled, reduced, waited for, copied back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.planned.plan import Bucket, Slot, TensorSpec


@dataclass(frozen=True)
class _Line:
    """A tensor, or the part of one that is in a bucket, as the timeline names it."""

    name: str


class BucketTrace:
    """Of one plan. timeline: None for none; costs next to nothing while it is off."""

    def __init__(self, timeline: Timeline | None, buckets: Sequence[Bucket], tensors: Sequence[TensorSpec]) -> None:
        self._timeline = timeline
        self._lines = [[_Line(_name(slot, tensors)) for slot in bucket.slots] for bucket in buckets]

    def filling(self, bucket: int) -> AbstractContextManager[None]:
        """In here gradients are copied into the bucket."""
        return self._span(bucket, "MEMCPY_IN_FUSION_BUFFER")

    def taking(self, bucket: int) -> AbstractContextManager[None]:
        """In here they are copied back."""
        return self._span(bucket, "MEMCPY_OUT_FUSION_BUFFER")

    def started(self, bucket: int) -> None:
        """The bucket is being reduced, whatever this rank does meanwhile."""
        self._begin(bucket, "ALLREDUCE")

    def waiting(self, bucket: int) -> None:
        """This rank has nothing else to do than to wait for it."""
        self.ended(bucket)
        self._begin(bucket, "WAIT_FOR_OTHER_RANKS")

    def ended(self, bucket: int) -> None:
        """It is reduced."""
        if self._timeline is not None and self._timeline.on:
            for line in self._lines[bucket]:
                self._timeline.end(line.name)

    def _begin(self, bucket: int, activity: str) -> None:
        if self._timeline is not None and self._timeline.on:
            for line in self._lines[bucket]:
                self._timeline.begin(line.name, activity)

    def _span(self, bucket: int, activity: str) -> AbstractContextManager[None]:
        return nullcontext() if self._timeline is None else self._timeline.span(activity, self._lines[bucket])


def _name(slot: Slot, tensors: Sequence[TensorSpec]) -> str:
    tensor, count = tensors[slot.tensor], slot.stop - slot.start
    part = "" if count == tensor.count else f"[{slot.offset}:{slot.offset + count}]"
    return f"gradients.{tensor.name}{part}"
