"""Gradients that Horovod's core reduces one by one, as operations of a graph: on the CPU or (with NCCL) on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine.api import Group, ReduceOptions, TensorSpec
from hvdkit.tensorflow import Compression
from hvdkit.tensorflow.variables import VariableSpec
from hvdkit_horovod.operations import plan_gradients


class DirectGradients:
    """Dense gradients of one list of variables; opened by all ranks together.

    binding: Horovod's binding of TensorFlow.
    group: the group of the process set.
    name: name of the list, the same on all ranks.
    specs: the variables.
    options: options of the reduction.
    Raises PlanMismatchError if the ranks' variables differ, TypeError for a dtype that Horovod's core cannot reduce.
    """

    def __init__(
        self,
        binding: Any,
        group: Group,
        name: str,
        specs: Sequence[VariableSpec],
        options: ReduceOptions,
    ) -> None:
        self._binding, self._specs = binding, list(specs)
        counts = [tf.TensorShape(spec.shape).num_elements() for spec in specs]
        tensors = [TensorSpec(spec.name, count, spec.dtype) for spec, count in zip(specs, counts, strict=True)]
        self._calls, self._mask_call = plan_gradients(group.transport, name, tensors, options)
        self._all = tf.function(self._reduce_all, autograph=False)

    def reduce_eagerly(self, gradients: Sequence[Any]) -> list[Any]:
        """Reduce the gradients eagerly; None for a gradient that no rank has.

        A rank that lacks one gets the others'.
        """
        there = tf.constant([float(one is not None) for one in gradients])
        given = [
            tf.zeros(spec.shape, spec.dtype) if one is None else one
            for one, spec in zip(gradients, self._specs, strict=True)
        ]
        reduced, present = self._all(given, there)
        return [one if flag > 0 else None for one, flag in zip(reduced, present.numpy(), strict=True)]

    def _reduce_all(self, gradients: list[Any], there: Any) -> tuple[list[Any], Any]:
        reduced = [self._reduce(at, gradient) for at, gradient in enumerate(gradients)]
        return reduced, self._binding.operation(self._mask_call, there)

    def reduce_in_graph(self, gradients: Sequence[Any], wanted: Sequence[int], _: object) -> list[Any]:
        """Reduce the gradients in `wanted`, with zeros for those that this rank lacks; returns None for the others."""
        reduced: list[Any] = [None] * len(gradients)
        for index in wanted:
            gradient, spec = gradients[index], self._specs[index]
            reduced[index] = self._reduce(index, tf.zeros(spec.shape, spec.dtype) if gradient is None else gradient)
        return reduced

    def close(self) -> None:
        """Do nothing: nothing is allocated."""

    def _reduce(self, at: int, gradient: Any) -> Any:
        call, factor = self._calls[at]
        if not factor:
            return self._binding.operation(call, gradient)
        half, dtype = Compression.fp16.compress(gradient * tf.cast(factor, gradient.dtype))
        return Compression.fp16.decompress(self._binding.operation(call, half), dtype)
