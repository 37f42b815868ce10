"""Horovod's core through horovod.tensorflow, for arrays in host memory.

TensorFlow in eager mode drops the names of operations, by which Horovod matches them between ranks; so each name has a
small graph of its own. A graph's call blocks; so each operation has a thread while it is under way.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from horovod.common import elastic
from horovod.tensorflow import mpi_ops

from hvdkit.errors import HorovodInternalError, RanksDisagreeError
from hvdkit_horovod.binding import IN_PLACE, REDUCTIONS, Binding, Call, Request

_MANY_THREADS = 100_000  # ranks may have any number of operations under way, in any order: none may wait for another


class TensorflowBinding(Binding):
    """See Binding."""

    framework = "tensorflow"
    reduced = frozenset({"float16", "float32", "float64", "int8", "uint8", "int32", "int64"})
    most_names = 256  # each name has a graph

    def __init__(self) -> None:
        super().__init__(horovod, mpi_ops, elastic)
        self._threads = ThreadPoolExecutor(_MANY_THREADS, "hvdkit-horovod")
        self._session_call = functools.lru_cache(maxsize=4096)(self._make_session_call)

    def start(self, call: Call, arrays: Sequence[Any]) -> Request:
        if call.op == "adasum" and self.basics.size() & (self.basics.size() - 1):
            raise HorovodInternalError("Horovod: Running Adasum with non-power of 2 ranks is not supported yet.")
        result = self._threads.submit(self._run, call, arrays)
        return Request(result.done, result.result)

    def _run(self, call: Call, arrays: Sequence[Any]) -> list[Any]:
        """Run the operation, in a thread in which no graph is being traced."""
        key = replace(call, name=graph_name(self.prefix + call.name), splits=())
        session_call = self._session_call(key, tuple(array.dtype.name for array in arrays))
        splits = [np.array(call.splits, np.int32)] if call.kind == "alltoall" else []
        try:
            results = [np.asarray(output) for output in session_call(*arrays, *splits)]
        except tf.errors.OpError as error:
            raise self.explain(error) from None
        if call.kind not in IN_PLACE:
            return results
        for array, values in zip(arrays, results, strict=True):
            np.copyto(array, values)
        return list(arrays)

    def operation(self, call: Call, tensor: Any) -> Any:
        """Add the operation to the graph that is being traced; returns its result, a tensor of that graph."""
        return self._output(replace(call, name=graph_name(call.name)), [tensor])[0]

    def _make_session_call(self, call: Call, dtypes: tuple[str, ...]) -> Callable[..., list[Any]]:
        """Make a function for the operation, on arrays of any shape; it runs a graph of its own in a session.

        The session has a thread of its own, which Horovod's operations do not block. A tf.function would need one of
        TensorFlow's threads for eager mode, of which there are as many as cores. Each operation of hvdkit's inside a
        tf.function of the user's blocks one of these until the operation here is done.
        """
        with tf.Graph().as_default() as graph:
            inputs = [tf.compat.v1.placeholder(dtype) for dtype in dtypes]
            splits = [tf.compat.v1.placeholder(tf.int32, [None])] if call.kind == "alltoall" else []
            outputs = self._output(call, inputs, *splits)
        config = tf.compat.v1.ConfigProto()
        config.session_inter_op_thread_pool.add(num_threads=1, global_name="hvdkit-horovod")
        session = tf.compat.v1.Session(graph=graph, config=config)
        function: Callable[..., list[Any]] = session.make_callable(outputs, [*inputs, *splits])
        return function

    def _output(self, call: Call, tensors: list[Any], *splits: Any) -> list[Any]:
        """Add the operation to the current graph; returns its results as tensors."""
        function = f"{'_' * (call.kind in REDUCTIONS)}{{}}{call.kind}"
        output = self.invoke(function, call, tensors, splits, ignore_name_scope=True)
        return list(output) if isinstance(output, list | tuple) else [output]

    def explain(self, error: Exception) -> HorovodInternalError:
        """See Binding. A failed precondition: ranks disagree, or a rank has joined and cannot contribute."""
        kind = RanksDisagreeError if isinstance(error, tf.errors.FailedPreconditionError) else HorovodInternalError
        return kind(f"Horovod: {plain_message(getattr(error, 'message', str(error)))}")


def plain_message(message: str) -> str:
    """Return Horovod's message without the lines that TensorFlow adds to it."""
    around = ("Graph execution error", "Detected at node", "Node: '", "<stack traces unavailable>", "[[", 'File "')
    said = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in said if line and not line.startswith(around)) or message


def graph_name(name: str) -> str:
    """Make a valid name for a node of a graph; the same on all ranks, and different for different names."""
    plain = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    return plain if plain == name else f"{plain}.{hashlib.sha1(name.encode()).hexdigest()[:12]}"
