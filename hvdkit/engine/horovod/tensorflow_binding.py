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

from hvdkit.engine.horovod.binding import Move, Pending
from hvdkit.errors import HorovodInternalError, RanksDisagreeError

_OPS = {
    "average": horovod.Average,
    "sum": horovod.Sum,
    "min": horovod.Min,
    "max": horovod.Max,
    "product": horovod.Product,
    "adasum": horovod.Adasum,
}
#: Operations without a name of the user's are numbered; so many graphs of a kind serve all numbers in turn.
_TURNS = 256
_MANY_THREADS = 100_000  # ranks may have any number of operations under way, in any order: none may wait for another


class TensorflowBinding:
    """See Binding."""

    framework = "tensorflow"
    reduced = frozenset({"float16", "float32", "float64", "int8", "uint8", "int32", "int64"})

    prefix = ""

    def __init__(self) -> None:
        self.basics = mpi_ops._basics
        self._threads = ThreadPoolExecutor(_MANY_THREADS, "hvdkit-horovod")

    def init(self, sets: Sequence[Any] | str, comm: Any = None) -> None:
        """See Binding."""
        horovod.init(comm=comm, process_sets=sets)

    def shutdown(self) -> None:
        """See Binding."""
        horovod.shutdown()

    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """See Binding."""
        if move.op == "adasum" and self.basics.size() & (self.basics.size() - 1):
            raise HorovodInternalError("Horovod: Running Adasum with non-power of 2 ranks is not supported yet.")
        return _Call(self._threads.submit(_run, replace(move, name=self.prefix + move.name), arrays), move, arrays)

    def prepare(self, move: Move, like: Any) -> Callable[[Any], Pending]:
        """See Binding."""
        return lambda array: self.start(move, [array])

    def scale(self, array: Any, factor: float) -> None:
        """See Binding; TensorFlow's tensors do not come here, they cannot be written to."""
        raise TypeError("a tensor of TensorFlow cannot be overwritten")

    def operation(self, move: Move, tensor: Any) -> Any:
        """See GraphBinding."""
        return _CALLS[move.kind](replace(move, name=graph_name(move.name)), [tensor])[0]

    def changes(self) -> Any:
        """See Binding."""
        return elastic.notification_manager

    def join(self) -> Callable[[], int | None]:
        """See Binding."""
        future = self._threads.submit(lambda: int(horovod.join()))

        def answer() -> int | None:
            return _result(future) if future.done() else None

        return answer


class _Call:
    """See Pending."""

    def __init__(self, future: Future[Any], move: Move, arrays: Sequence[Any]) -> None:
        self._future, self._move, self._arrays = future, move, arrays

    def done(self) -> bool:
        """See Pending."""
        return self._future.done()

    def wait(self) -> list[Any]:
        """See Pending."""
        made: list[Any] = _result(self._future)
        if self._move.kind not in ("allreduce", "broadcast"):
            return made
        for array, values in zip(self._arrays, made, strict=True):
            np.copyto(array, values)
        return list(self._arrays)


def _run(move: Move, arrays: Sequence[Any]) -> list[Any]:
    """Do the operation; in a thread, where no graph is being traced."""
    session_call = _session_call(
        replace(move, name=graph_name(move.name), splits=()), tuple(array.dtype.name for array in arrays)
    )
    splits = [np.array(move.splits, np.int32)] if move.kind == "alltoall" else []
    return [np.asarray(one) for one in session_call(*arrays, *splits)]


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except tf.errors.OpError as error:
        # A failed precondition of Horovod's is ranks that disagree, or one that has joined and has nothing to give.
        kind = RanksDisagreeError if isinstance(error, tf.errors.FailedPreconditionError) else HorovodInternalError
        raise kind(f"Horovod: {plain_message(error.message)}") from None


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


@functools.lru_cache(maxsize=4096)
def _session_call(move: Move, dtypes: tuple[str, ...]) -> Callable[..., list[Any]]:
    """The operation as a function of arrays of any shape. It runs a graph of its own in a session.

    The session has a thread of its own, which Horovod's operations do not block. A tf.function would need one of
    TensorFlow's threads for eager mode, of which there are as many as cores. Each operation of hvdkit's inside a
    tf.function of the user's blocks one of these until the operation here is done.
    """
    with tf.Graph().as_default() as graph:
        inputs = [tf.compat.v1.placeholder(dtype) for dtype in dtypes]
        if move.kind == "alltoall":
            inputs.append(tf.compat.v1.placeholder(tf.int32, [None]))
        outputs = _CALLS[move.kind](move, inputs)
    config = tf.compat.v1.ConfigProto()
    config.session_inter_op_thread_pool.add(num_threads=1, global_name="hvdkit-horovod")
    session = tf.compat.v1.Session(graph=graph, config=config)
    call: Callable[..., list[Any]] = session.make_callable(outputs, inputs)
    return call


def _allreduce(move: Move, tensors: Sequence[Any]) -> list[Any]:
    call, given = (mpi_ops._allreduce, tensors[0]) if len(tensors) == 1 else (mpi_ops._grouped_allreduce, list(tensors))
    made = call(
        given,
        name=move.name,
        op=_OPS[move.op],
        prescale_factor=move.prescale,
        postscale_factor=move.postscale,
        ignore_name_scope=True,
        process_set=move.process_set,
    )
    return [made] if len(tensors) == 1 else list(made)


def _broadcast(move: Move, tensors: Sequence[Any]) -> list[Any]:
    options = {"ignore_name_scope": True, "process_set": move.process_set}
    return [mpi_ops.broadcast(tensors[0], move.root, name=move.name, **options)]


def _allgather(move: Move, tensors: Sequence[Any]) -> list[Any]:
    options = {"ignore_name_scope": True, "process_set": move.process_set}
    return [mpi_ops.allgather(tensors[0], name=move.name, **options)]


def _alltoall(move: Move, tensors: Sequence[Any]) -> list[Any]:
    options = {"ignore_name_scope": True, "process_set": move.process_set}
    return list(mpi_ops.alltoall(tensors[0], splits=tensors[1], name=move.name, **options))


def _reducescatter(move: Move, tensors: Sequence[Any]) -> list[Any]:
    made = mpi_ops._reducescatter(
        tensors[0],
        name=move.name,
        op=_OPS[move.op],
        ignore_name_scope=True,
        process_set=move.process_set,
        prescale_factor=move.prescale,
        postscale_factor=move.postscale,
    )
    return [made]


_CALLS: dict[str, Callable[[Move, Sequence[Any]], list[Any]]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
