"""Drives a sharded strategy for adapters with tensors as arrays in host memory: Keras on each of its backends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hvdkit.engine.groups import Group
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.planned.arrays import ArraySource, Targets
from hvdkit.engine.planned.plan import Plan, TensorSpec, cut_slots
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.scatter import ScatterGradients
from hvdkit.engine.sharding.strategy import ZeroStrategy
from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.engine.strategy import Parameters
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Array, Buffer


class ShardedArrays:
    """Reduce-scatters the gradients of one list of tensors, and all-gathers their values.

    A step: begin(), arrived() for each tensor, in any order and from any thread, finish(). Then gather().
    Arrays are (n,) in the dtype's storage. All ranks open it together.

    group: the ranks that train together.
    tensors: the list, in the same order on all ranks.
    options: the reduction of gradients, without codings.
    compute_threads: number of threads that this rank computes with; 0 for the number of its cores.
    Raises PlanMismatchError if the ranks' tensors differ.

    The attribute `pieces` has this rank's pieces, in the order of the arrays in begin() and gather().
    """

    def __init__(
        self, group: Group, tensors: Sequence[TensorSpec], options: ReduceOptions, *, compute_threads: int
    ) -> None:
        self._gradients, self._values = _Gradients(len(tensors)), _Values()
        self._shard = _Shard(self._gradients)
        self._scatter = ScatterGradients(options, self._shard)
        self._strategy = ZeroStrategy(self._scatter, self._shard)
        self._begun = self._closed = False
        name = f"arrays.{group.engine.count('arrays')}"
        parameters = Parameters(name, tensors, self._gradients, self._values, compute_threads)

        def attach(_: Transport, __: Sequence[int]) -> None:
            self._strategy.attach(parameters, group)

        collective_step(group.engine, "plan", attach, name=name)
        self.pieces = self._values.pieces = self._shard.pieces

    @property
    def plan(self) -> Plan:
        """The plan of the buckets in which gradients are sent."""
        return self._gradients.plan

    @property
    def depth(self) -> int:
        """The maximum number of buckets that are read at the same time; gradients of earlier buckets are not read."""
        return self._scatter.depth

    def begin(self, results: Targets) -> None:
        """Begin a step. results: an array for each piece, overwritten with its gradient until finish() returns.

        Raises BackwardInterruptedError if the previous step ended after some of its gradients had been sent.
        """
        self._check_open()
        if self._begun:
            self._strategy.cancel()
        self._begun = True
        self._gradients.results = results

    def arrived(self, tensor: int, gradient: Array | None) -> None:
        """Pass a gradient, or None for a gradient that this rank does not have in this step.

        It is read, and its reference dropped, now or in a later call of the step; the caller must not change it until
        then.
        """
        self._gradients.put(tensor, gradient)
        self._strategy.arrived(tensor)

    def finish(self) -> Collection[int]:
        """Complete the reduction, with all results in the arrays of begin(); collective.

        Returns the tensors without a gradient on any rank; their results are undefined. Raises ValueError if no tensor
        has a gradient, RankLostError, with the tensors concerned, if a rank has ended.
        """
        try:
            self._strategy.before_step()
            self._begun = False
        finally:
            self._gradients.abandon()
            self._gradients.results = ()
        if len(self._shard.unused) == len(self.plan.tensors):
            raise ValueError("No gradients provided for any variable.")
        return self._shard.unused

    def scatter(self, gradients: Sequence[Array | None], results: Targets) -> Collection[int]:
        """Reduce gradients when all are available; see begin(), arrived() and finish()."""
        self.begin(results)
        for tensor in reversed(range(len(gradients))):
            self.arrived(tensor, gradients[tensor])
        return self.finish()

    def gather(self, pieces: Sequence[Array], targets: Targets | None) -> None:
        """Assemble the tensors from the pieces of all ranks; collective.

        pieces: the values of this rank's pieces. targets: an array for each tensor; None to discard the values.
        """
        self._check_open()
        self._values.begin(pieces, targets)
        try:
            self._strategy.after_step()
        finally:
            self._values.begin((), None)

    def _check_open(self) -> None:
        """Raise HorovodInternalError after close(); a step that was compiled before close() still calls this object."""
        if self._closed:
            raise HorovodInternalError(
                "This training step was compiled for the ranks of before shutdown(), among which the optimizer's state "
                "was divided. Compile it anew: fit() does so after KerasState.sync(); make a tf.function of your own "
                "inside the function that hvd.elastic.run calls."
            )

    def close(self) -> None:
        """Free the buckets; collective."""
        self._closed = True
        self._strategy.detach()


class _Gradients(ArraySource):
    """The source of gradients of which this rank gets pieces, in place if possible. results: an array a piece."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.results: Targets = ()
        self._pieces_at: dict[tuple[int, int], int] = {}  # by tensor and first element

    def divide(self, pieces: Sequence[TensorRange]) -> None:
        """Set this rank's pieces."""
        self._pieces_at = {(piece.tensor, piece.offset): index for index, piece in enumerate(pieces)}

    def target_of(self, tensor: int, part: slice) -> Array:
        """Implement ArraySource.target_of(): an in-place segment is a whole piece, because both are cut alike."""
        return self.results[self._pieces_at[tensor, part.start]]


class _Shard:
    """The GradientSink and OptimizerShards of arrays: records this rank's ranges, and copies their gradients."""

    in_place = True

    def __init__(self, gradients: _Gradients) -> None:
        self._gradients = gradients
        self._in_bucket: dict[int, list[int]] = {}
        self.pieces: Sequence[TensorRange] = ()
        self.unused: frozenset[int] = frozenset()

    def collect(self, transport: Transport) -> None:
        """Implement OptimizerShards.collect(): do nothing, because the parameters are divided only once."""

    def divide(self, parameters: Parameters, pieces: Sequence[TensorRange], group: Group) -> None:
        """See OptimizerShards.divide."""
        self.pieces = list(pieces)
        self._gradients.divide(pieces)
        for index, piece in enumerate(pieces):
            self._in_bucket.setdefault(piece.bucket, []).append(index)

    def gathered(self) -> None:
        """See OptimizerShards.gathered."""

    def release(self, tensor: int) -> None:
        """See GradientSink.release."""
        self._gradients.put(tensor, None)

    def receive(self, bucket: int, memory: Buffer) -> None:
        """See GradientSink.receive."""
        in_place = self._gradients.in_place(bucket)
        for index in self._in_bucket.get(bucket, ()):
            piece = self.pieces[index]
            if piece.start not in in_place:
                result = self._gradients.results[index]
                np.copyto(result, memory.array[piece.in_bucket], casting="no")

    def received(self, unused: Collection[int]) -> None:
        """See GradientSink.received."""
        self.unused = frozenset(unused)


class _Values:
    """The source of the tensors' values: fills this rank's pieces, and drains the other ranks'. See split_plan()."""

    def __init__(self) -> None:
        self._plan = Plan((), ())
        self.pieces: Sequence[TensorRange] = ()
        self._pieces_in: dict[
            int, list[tuple[int, TensorRange, bool]]
        ] = {}  # bucket -> (index, piece, is it in place?)
        self._arrays: Sequence[Array] = ()
        self._targets: Targets | None = None

    def begin(self, arrays: Sequence[Array], targets: Targets | None) -> None:
        """Set the arrays of the next gather. arrays: of the pieces. targets: of the tensors; None to discard them."""
        self._arrays, self._targets = arrays, targets

    def on_plan(self, plan: Plan) -> None:
        """See TensorSource.on_plan."""
        self._plan = plan
        self._pieces_in.clear()

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int], /) -> Filled:
        """Implement TensorSource.fill(). bucket: of the first half of the plan: its slots are this rank's pieces."""
        if bucket not in self._pieces_in:  # the memory is the same each time
            parts = cut_slots(self._plan.buckets[bucket].slots, owned, memory.itemsize)
            in_place = {slot.start for slot, is_in_place in parts if is_in_place}
            self._pieces_in[bucket] = [
                (index, piece, piece.start in in_place)
                for index, piece in enumerate(self.pieces)
                if piece.bucket == bucket
            ]
        segments = []
        for index, piece, is_in_place in self._pieces_in[bucket]:
            array = self._arrays[index]
            if is_in_place:
                values = Buffer(array, memory.dtype)
                segments.append(InPlaceSegment(piece.start, values, values))
            else:
                np.copyto(memory.array[piece.in_bucket], array, casting="no")
            if self._targets is not None:
                self._targets[piece.tensor][piece.elements] = array
        return Filled(frozenset(), segments)

    def drain(self, bucket: int, memory: Buffer, _: Collection[int], /) -> None:
        """Implement TensorSource.drain(). bucket: of the second half of the plan: its slots are other ranks' pieces."""
        if self._targets is None:
            return
        for slot in self._plan.buckets[bucket].slots:
            part = self._targets[slot.tensor][slot.offset : slot.offset + slot.stop - slot.start]
            np.copyto(part, memory.array[slot.start : slot.stop], casting="no")
