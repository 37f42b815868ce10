"""A strategy in one file: gradients are averaged over all ranks, then clipped to a length, before every step.

    hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=ClippedAverage(max_norm=1.0))

It imports the door of the engine only, so it serves PyTorch, TensorFlow and Keras on all backends.
"""

from __future__ import annotations

import numpy as np

from hvdkit.engine.api import (
    Average,
    FlatValues,
    Group,
    Parameters,
    Strategy,
    as_buffer,
    check_tensors,
    do,
    reduce_options,
)


class ClippedAverage(Strategy):
    """Strategy of averaged gradients whose length, over all parameters together, is at most `max_norm`.

    max_norm: the largest length; longer gradients are scaled to it.
    """

    # before_step() runs inside step(), when all gradients of this rank are complete.
    overlaps_backward = False
    # A second window would add its gradients to clipped ones.
    repeatable = False

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise ValueError(f"ClippedAverage: max_norm is {max_norm}; it must be more than 0.")
        self._max_norm = max_norm

    def attach(self, parameters: Parameters, group: Group) -> None:
        check_tensors(group.transport, parameters.tensors, f"ClippedAverage(max_norm={self._max_norm})")
        self._group, self._name = group, f"{parameters.name}.clipped"
        self._gradients = FlatValues(parameters.tensors, parameters.gradients)
        self._flat = np.zeros(self._gradients.count, self._gradients.dtype)

    def before_step(self) -> None:
        self._gradients.read(self._flat)
        buffer = as_buffer(self._flat)
        options = reduce_options([buffer.dtype], Average, 1.0, 1.0, "ClippedAverage")
        do(self._group, "allreduce", self._name, [(buffer.dtype, (buffer.count,))], [buffer], options)
        length = float(np.linalg.norm(self._flat))
        if length > self._max_norm:
            self._flat *= self._max_norm / length
        self._gradients.write(self._flat)
