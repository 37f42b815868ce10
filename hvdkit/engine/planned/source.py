"""The source of a plan's tensors: the part of a planned reduction that knows a framework."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Buffer


@dataclass(frozen=True)
class Filled:
    """How a bucket was filled.

    locally_unused: indices of the tensors that this rank does not use in this round. in_place: the segments that were
    not copied, in rising order.
    """

    locally_unused: frozenset[int]
    in_place: Sequence[InPlaceSegment] = ()


class TensorSource(Protocol):
    """Copies a framework's gradients into buckets and back; one implementation a framework.

    Of each bucket fill() is called first, then drain(), in turn, under the reducer's lock.
    """

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """Copy a bucket's tensors into `memory` (data_count,); those within the shard `owned` may stay in place.

        owned: (start, stop), elements of `memory`. Tensors that this rank does not use are filled with zeros, or with
        values that are the same on all ranks.
        """

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """Copy a bucket's reduced tensors out of `memory` (data_count,), except those reduced as in-place segments.

        globally_unused: tensors that no rank uses; they are left alone.
        """

    def on_plan(self, plan: Plan) -> None:
        """Take note of the buckets: called before the first fill(), and again when other buckets replace them.

        Those have other memory. None of the replaced ones is started.
        """


class OwnTensors(Protocol):
    """The tensors of a framework behind a TensorSource of gradients, for who works on these and not on buckets."""

    @property
    def parameters(self) -> Sequence[Any]:
        """The framework's parameters, in the order in which all ranks have them."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """The same, described."""

    @property
    def strides(self) -> Sequence[tuple[int, ...]]:
        """Of each parameter in memory, in elements, as all ranks have planned."""

    @property
    def written(self) -> Collection[int]:
        """Indices of the parameters whose gradient was written since the last reduction."""

    def dense_gradient(self, index: int) -> Any:
        """The parameter's gradient, made dense in its place if it is sparse; None without one."""

    def release(self, index: int) -> None:
        """Free the parameter's gradient, which has been copied."""
