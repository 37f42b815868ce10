"""Gradients that Horovod's core reduces one by one, as operations of a graph: on the CPU or (with NCCL) on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine.groups import Group
from hvdkit.engine.horovod.binding import GraphBinding
from hvdkit.engine.horovod.gradients import agree_on, gradient_move, narrow_wire
from hvdkit.engine.horovod.transport import HorovodTransport
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.request import ReduceOptions
from hvdkit.tensorflow.compression import clamp
from hvdkit.tensorflow.variables import VariableSpec


class DirectGradients:
    """Dense gradients of one list of variables; opened by all ranks together.

    name: that all ranks know the list by. Raises PlanMismatchError where the ranks' variables differ, TypeError for a
    dtype that Horovod's core does not add.
    """

    def __init__(
        self,
        binding: GraphBinding,
        group: Group,
        name: str,
        specs: Sequence[VariableSpec],
        options: ReduceOptions,
    ) -> None:
        assert isinstance(group.transport, HorovodTransport)
        counts = [tf.TensorShape(spec.shape).num_elements() for spec in specs]
        agree_on(
            group.transport,
            [TensorSpec(spec.name, count, spec.dtype) for spec, count in zip(specs, counts, strict=True)],
            options,
        )
        self._binding, self._set, self._size = binding, group.transport.process_set, group.transport.size
        self._name, self._specs, self._options = name, list(specs), options
        self._all = tf.function(self._reduce_all, autograph=False)

    def reduce_eagerly(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients; None where no rank has one, and where only others do, theirs."""
        there = tf.constant([float(one is not None) for one in gradients])
        given = [
            tf.zeros(spec.shape, spec.dtype) if one is None else one
            for one, spec in zip(gradients, self._specs, strict=True)
        ]
        reduced, present = self._all(given, there)
        return [one if flag > 0 else None for one, flag in zip(reduced, present.numpy(), strict=True)]

    def _reduce_all(self, gradients: list[Any], there: Any) -> tuple[list[Any], Any]:
        move, _ = gradient_move(f"{self._name}.presence", self._set, "float32", self._options, self._size, "none")
        reduced = [self._reduce(at, one) for at, one in enumerate(gradients)]
        return reduced, self._binding.operation(move, there)

    def reduce_in_graph(self, gradients: Sequence[Any], wanted: Sequence[int], _: object) -> list[Any]:
        """The reduced gradients of those in `wanted`, zeros standing for what this rank lacks; None for the others."""
        reduced: list[Any] = [None] * len(gradients)
        for index in wanted:
            gradient, spec = gradients[index], self._specs[index]
            reduced[index] = self._reduce(index, tf.zeros(spec.shape, spec.dtype) if gradient is None else gradient)
        return reduced

    def close(self) -> None:
        """Nothing is allocated."""

    def _reduce(self, at: int, gradient: Any) -> Any:
        spec = self._specs[at]
        name = f"{self._name}.{at}.{spec.name}"
        wire = narrow_wire(spec.name, spec.dtype, self._options)
        move, narrow = gradient_move(name, self._set, spec.dtype, self._options, self._size, wire)
        if not narrow:
            return self._binding.operation(move, gradient)
        half = tf.cast(clamp(gradient * tf.cast(narrow, gradient.dtype), tf.float16.max), tf.float16)
        return tf.cast(self._binding.operation(move, half), gradient.dtype)
