"""Horovod's core by way of horovod.tensorflow, for arrays in the host's memory.

TensorFlow in eager mode drops the names of operations, by which Horovod matches them between ranks; so each name has a
small graph of its own. A graph's call blocks; so each operation has a thread while it is under way.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from horovod.common import elastic
from horovod.tensorflow import mpi_ops

from hvdkit.engine.horovod.binding import GraphBinding, Move, Pending
from hvdkit.errors import HorovodInternalError, RanksDisagreeError

#: Operations without a name of the user's are numbered; so many graphs of a kind serve all numbers in turn.
_TURNS = 256
_MANY_THREADS = 100_000  # ranks may have any number of operations under way, in any order: none may wait for another


class TensorflowBinding(GraphBinding):
    """See Binding."""

    framework = "tensorflow"
    reduced = frozenset({"float16", "float32", "float64", "int8", "uint8", "int32", "int64"})

    def __init__(self) -> None:
        super().__init__(horovod, mpi_ops, elastic)
        self._threads = ThreadPoolExecutor(_MANY_THREADS, "hvdkit-horovod")
        self._session_call = functools.lru_cache(maxsize=4096)(self._make_session_call)

    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """See Binding."""
        if move.op == "adasum" and self.basics.size() & (self.basics.size() - 1):
            raise HorovodInternalError("Horovod: Running Adasum with non-power of 2 ranks is not supported yet.")
        return _Call(self, self._threads.submit(self._run, move, arrays), move, arrays)

    def _run(self, move: Move, arrays: Sequence[Any]) -> list[Any]:
        """Do the operation; in a thread, where no graph is being traced."""
        key = replace(move, name=graph_name(self.prefix + move.name), splits=())
        session_call = self._session_call(key, tuple(array.dtype.name for array in arrays))
        splits = [np.array(move.splits, np.int32)] if move.kind == "alltoall" else []
        return [np.asarray(output) for output in session_call(*arrays, *splits)]

    def scale(self, array: Any, factor: float) -> None:
        """See Binding; TensorFlow's tensors do not come here, they cannot be written to."""
        raise TypeError("a tensor of TensorFlow cannot be overwritten")

    def operation(self, move: Move, tensor: Any) -> Any:
        """See GraphBinding."""
        return self._output(replace(move, name=graph_name(move.name)), [tensor])[0]

    def _make_session_call(self, move: Move, dtypes: tuple[str, ...]) -> Callable[..., list[Any]]:
        """The operation as a function of arrays of any shape. It runs a graph of its own in a session.

        The session has a thread of its own, which Horovod's operations do not block. A tf.function would need one of
        TensorFlow's threads for eager mode, of which there are as many as cores. Each operation of hvdkit's inside a
        tf.function of the user's blocks one of these until the operation here is done.
        """
        with tf.Graph().as_default() as graph:
            inputs = [tf.compat.v1.placeholder(dtype) for dtype in dtypes]
            if move.kind == "alltoall":
                inputs.append(tf.compat.v1.placeholder(tf.int32, [None]))
            outputs = self._output(move, inputs)
        config = tf.compat.v1.ConfigProto()
        config.session_inter_op_thread_pool.add(num_threads=1, global_name="hvdkit-horovod")
        session = tf.compat.v1.Session(graph=graph, config=config)
        call: Callable[..., list[Any]] = session.make_callable(outputs, inputs)
        return call

    def _output(self, move: Move, tensors: Sequence[Any]) -> list[Any]:
        """The results of the operation as tensors of the present graph. tensors: of an alltoall the splits as well."""
        tensor, options = tensors[0], {"name": move.name, "ignore_name_scope": True, "process_set": move.process_set}
        factors = {"prescale_factor": move.prescale, "postscale_factor": move.postscale}
        reduction = {"op": self._ops[move.op], **options, **factors}
        if move.kind == "broadcast":
            return [mpi_ops.broadcast(tensor, move.root, **options)]
        if move.kind == "allgather":
            return [mpi_ops.allgather(tensor, **options)]
        if move.kind == "alltoall":
            return list(mpi_ops.alltoall(tensor, splits=tensors[1], **options))
        if move.kind == "reducescatter":
            return [mpi_ops._reducescatter(tensor, **reduction)]
        if len(tensors) == 1:
            return [mpi_ops._allreduce(tensor, **reduction)]
        return list(mpi_ops._grouped_allreduce(list(tensors), **reduction))

    def explain(self, error: Exception) -> HorovodInternalError:
        """See Binding. A failed precondition: ranks disagree, or one has joined and has nothing to give."""
        kind = RanksDisagreeError if isinstance(error, tf.errors.FailedPreconditionError) else HorovodInternalError
        return kind(f"Horovod: {plain_message(getattr(error, 'message', str(error)))}")


class _Call:
    """See Pending."""

    def __init__(
        self, binding: TensorflowBinding, future: Future[list[Any]], move: Move, arrays: Sequence[Any]
    ) -> None:
        self._binding, self._future, self._move, self._arrays = binding, future, move, arrays

    def done(self) -> bool:
        """See Pending."""
        return self._future.done()

    def wait(self) -> list[Any]:
        """See Pending."""
        try:
            results = self._future.result()
        except tf.errors.OpError as error:
            raise self._binding.explain(error) from None
        if self._move.kind not in ("allreduce", "broadcast"):
            return results
        for array, values in zip(self._arrays, results, strict=True):
            np.copyto(array, values)
        return list(self._arrays)


def plain_message(message: str) -> str:
    """What Horovod said, without what TensorFlow puts around it."""
    around = ("Graph execution error", "Detected at node", "Node: '", "<stack traces unavailable>", "[[", 'File "')
    said = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in said if line and not line.startswith(around)) or message


def graph_name(name: str) -> str:
    """A name for a node of a graph; the same on all ranks, and another one for another name."""
    numbered = re.fullmatch(r"(.*\.noname\.)(\d+)((?:\.\w+)?)", name)
    if numbered:
        name = f"{numbered[1]}{int(numbered[2]) % _TURNS}{numbered[3]}"
    plain = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    return plain if plain == name else f"{plain}.{hashlib.sha1(name.encode()).hexdigest()[:12]}"
