"""Broadcast of variables and objects, so that all ranks start equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvdkit.engine import job_objects
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.tensorflow.ops import broadcast_
from hvdkit.tensorflow.tracing import in_python, in_session

T = TypeVar("T")

_TOGETHER_BYTES = 64 * 2**20  # of variables per operation; copies need as much memory


@in_python
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite the variables of a model or an optimizer on all ranks with those of rank root_rank.

    variables: of TensorFlow or Keras, of any sendable dtype, with the same shapes, dtypes and order on all ranks (else
    HorovodInternalError on every rank).
    root_rank: a rank of the whole job.
    process_set: the ranks that take part.
    inplace: accepted as in Horovod, and ignored.

    Raises ValueError for a variable of unknown shape.
    Inside a tf.function the broadcast runs each time the graph runs. In a graph for tf.compat.v1.Session it returns the
    operation to run, elsewhere None. Raises what broadcast() raises.
    """
    done = [broadcast_(some, root_rank, process_set=process_set) for some in _together(list(variables))]
    return tf.group(*done) if in_session() else None


def _together(variables: Sequence[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    nbytes = 0
    for variable in variables:
        count = tf.TensorShape(variable.shape).num_elements()
        if count is None:
            raise ValueError(
                f"The variable {variable.name} has the shape {variable.shape}, which is not known, so it cannot be "
                "broadcast. Give it a shape (validate_shape=True), or leave it out."
            )
        size = tf.as_dtype(variable.dtype).size * count
        if group and nbytes + size > _TOGETHER_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(variable)
        nbytes += size
    if group:
        yield group


@in_python
def broadcast_object(
    obj: T,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Return the object of rank root_rank on every rank.

    obj: can be pickled; ignored on other ranks than the root.
    root_rank: a rank of the whole job.
    session: accepted as in Horovod, and ignored.
    name: of the operation, the same on all ranks.
    process_set: the ranks that take part.

    Call it from Python, not from a graph.
    Raises ValueError for a root that does not exist, NotInitializedError before init().
    """
    return job_objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[T], T]:
    """Return broadcast_object() as a function of the object, with these arguments; raises the same errors."""

    def broadcast(obj: T) -> T:
        return job_objects.broadcast_object(obj, root_rank, name, process_set)

    return broadcast


@in_python
def allgather_object(
    obj: T, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Return the list of the objects of all ranks of the set, in rank order, on every rank.

    obj: can be pickled.
    session: accepted as in Horovod, and ignored.
    name: of the operation, the same on all ranks.
    process_set: the ranks that take part.

    Call it from Python, not from a graph.
    Raises NotInitializedError before init().
    """
    return job_objects.allgather_object(obj, name, process_set)
