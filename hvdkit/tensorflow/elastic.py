"""Elastic training: `hvd.elastic.TensorFlowState`, `TensorFlowKerasState` and `run`.

Worlds shrink and grow under `hvdrun --elastic`, and under `horovodrun --min-np` with Horovod's core as engine. In other
worlds the calls do the same as Horovod's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import tensorflow as tf

from hvdkit.checkpoint.arrays import CheckpointableArrays, SavedVariables
from hvdkit.checkpoint.store import Store
from hvdkit.elastic.run import run as run_elastic
from hvdkit.elastic.run import run_fn
from hvdkit.elastic.state import Handler, ObjectState
from hvdkit.engine.basics import rank, shutdown
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.basics import init
from hvdkit.tensorflow.state import broadcast_object, broadcast_object_fn, broadcast_variables
from hvdkit.tensorflow.tracing import raise_what_failed
from hvdkit.tensorflow.variables import view_of

__all__ = [
    "HorovodInternalError",
    "TensorFlowKerasState",  # noqa: F822 (it comes from __getattr__)
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]


class TensorFlowState(ObjectState):
    """The state of an elastic training: `state = hvd.elastic.TensorFlowState(model.variables, epoch=0)`.

    Each argument is an attribute: `state.variables`, `state.epoch += 1`. `commit` saves all of them in memory,
    `restore` returns to the last commit, `sync` broadcasts those of rank 0 and commits them. For lists of variables
    only their values are saved and sent; other values are copied and pickled as a whole.

    variables: of TensorFlow or Keras, in the same order on all ranks; may be None. session: of TensorFlow 1, must be
    None (else ValueError). `sync` is collective and raises what broadcast_variables() raises.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError(
                "TensorFlowState() got a session of TensorFlow 1, whose variables elastic jobs do not save. Use "
                "eager execution and remove the argument, or train without --elastic."
            )
        super().__init__(broadcast_object, variables=list(variables or ()), **kwargs)

    def handler_for(self, value: Any) -> Handler | None:
        if isinstance(value, (list, tuple)) and value and all(hasattr(one, "assign") for one in value):
            return SavedVariables("The list of variables", lambda: value, view_of, broadcast_variables)
        return None

    def open_store(self, directory: str) -> Store:
        """See State.open_store. Raises ValueError for a value that is not a list of variables, a number or a string."""
        kept = CheckpointableArrays(f"tensorflow {tf.__version__}", cast(Mapping[str, SavedVariables], self._handlers))
        return Store(directory, kept, self._plain(), keep=3)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(func: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """Make a training function restart from the last commit when ranks come, end or fail; see hvdkit.elastic.run.run.

    A collective that fails inside a graph raises an error of TensorFlow's; it is recognized as hvdkit's error.
    """
    return run_elastic(raise_what_failed(func))


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":  # needs Keras
        return importlib.import_module("hvdkit.tensorflow.keras").elastic.KerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
