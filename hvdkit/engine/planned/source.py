"""The source of a plan's tensors: the framework-specific side of a planned reduction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Buffer


@dataclass(frozen=True)
class Filled:
    """The result of filling a bucket.

    locally_unused: indices of the tensors that this rank does not use in this round. in_place: the segments that were
    not copied, in ascending order.
    """

    locally_unused: frozenset[int]
    in_place: Sequence[InPlaceSegment] = ()


class TensorSource(Protocol):
    """Copies a framework's gradients into buckets and back; one implementation a framework.

    For each bucket fill() and drain() are called in turn, under the reducer's lock.
    """

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """Copy a bucket's tensors into `memory` (data_count,); those within the shard `owned` may stay in place.

        owned: (start, stop), elements of `memory`. Tensors that this rank does not use are filled with zeros, or with
        values that are the same on all ranks.
        """

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """Copy a bucket's reduced tensors out of `memory` (data_count,), except those reduced as in-place segments.

        globally_unused: tensors that no rank uses; they must not be changed.
        """

    def on_plan(self, plan: Plan) -> None:
        """Take note of the buckets: called before the first fill(), and again when other buckets replace them.

        The new buckets have other memory. None of the replaced buckets is started.
        """


class OwnTensors(Protocol):
    """The framework's tensors behind a TensorSource of gradients, for code that uses these instead of buckets."""

    @property
    def parameters(self) -> Sequence[Any]:
        """The framework's parameters, in the same order on all ranks."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """The description of each parameter."""

    @property
    def strides(self) -> Sequence[tuple[int, ...]]:
        """The strides of each parameter in memory, in elements, as agreed by all ranks."""

    @property
    def written(self) -> Collection[int]:
        """The indices of the parameters whose gradient was written since the last reduction."""

    def dense_gradient(self, index: int) -> Any:
        """Return the parameter's gradient, or None. A sparse gradient is replaced by a dense gradient first."""

    def release(self, index: int) -> None:
        """Free the parameter's gradient after it has been copied."""
