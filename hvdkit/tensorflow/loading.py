"""Recording of the time that training waits for tf.data, eagerly and in graphs, for profiles."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine.observe.recording import RECORDER, clock
from hvdkit.profiling.loading import time_method
from hvdkit.tensorflow.tracing import call_in_graph, in_python


@functools.cache
def watch_datasets() -> None:
    """Count each element of every Dataset iterator as waiting for data; in graphs traced from now on."""
    iterator: Any = type(iter(tf.data.Dataset.range(1)))
    advance = iterator._next_internal
    time_method(iterator, "_next_internal")
    advance_timed = iterator._next_internal

    @in_python
    def _next_internal(self: Any) -> Any:
        if tf.executing_eagerly():
            return advance_timed(self)
        began = call_in_graph(_now, [], [tf.float64], "hvdkit_loading")
        with tf.control_dependencies(began):
            element = advance(self)
        with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
            call_in_graph(_loaded, began, [], "hvdkit_loaded")
        return element

    iterator._next_internal = _next_internal


def _now() -> list[Any]:
    return [np.asarray(clock())]


def _loaded(began: Any) -> list[Any]:
    RECORDER.loading(float(began), clock())
    return []
