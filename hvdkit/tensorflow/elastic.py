"""Training that can be taken up again: `hvd.elastic.TensorFlowState`, `TensorFlowKerasState` and `run`.

Worlds shrink and grow under `hvdrun --elastic`, and where Horovod's core is the engine under `horovodrun --min-np`. In
others all of them do what Horovod's do there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import tensorflow as tf

from hvdkit.checkpoint.arrays import CheckpointableArrays
from hvdkit.checkpoint.store import Store
from hvdkit.elastic.run import run as run_elastic
from hvdkit.elastic.run import run_fn
from hvdkit.elastic.state import Handler, ObjectState
from hvdkit.engine.basics import rank, shutdown
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.basics import init
from hvdkit.tensorflow.state import broadcast_object, broadcast_object_fn, broadcast_variables
from hvdkit.tensorflow.tracing import behind
from hvdkit.tensorflow.variables import view_of
from hvdkit.transport.buffer import Array

__all__ = [
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
    """What is to be kept of a training: `state = hvd.elastic.TensorFlowState(model.variables, epoch=0)`.

    Each argument is an attribute: `state.variables`, `state.epoch += 1`. `commit` saves them in memory, `restore` goes
    back to what was committed, `sync` gives every rank rank 0's and saves them. Lists of variables stay the variables
    they are, and only their values are saved and sent; other values are copied and pickled as a whole.

    variables: of TensorFlow or Keras, in the same order on all ranks; None for none. session: as in Horovod, must be
    None. `sync` is collective and raises what broadcast_variables does.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError("TensorFlowState(): session belongs to TensorFlow 1, which hvdkit does not support.")
        super().__init__(broadcast_object, variables=list(variables or ()), **kwargs)

    def handler_for(self, value: Any) -> Handler | None:
        """See ObjectState.handler_for."""
        if isinstance(value, (list, tuple)) and value and all(hasattr(one, "assign") for one in value):
            return _Variables(value)
        return None

    def save_to(self, directory: str) -> None:
        """See State.save_to. Raises ValueError for a value that is no list of variables, number nor text."""
        store = self._store(directory)
        store.save()
        store.wait()

    def load_from(self, directory: str) -> bool:
        """See State.load_from."""
        store = self._store(directory)
        if not store.load():
            return False
        for name, value in store.values.items():
            setattr(self, name, value)
        return True

    def _store(self, directory: str) -> Store:
        variables = {name: one for name, one in self._handlers.items() if isinstance(one, _Variables)}
        kept = CheckpointableArrays(f"tensorflow {tf.__version__}", variables)
        return Store(directory, kept, self._plain(), keep=3)


class _Variables:
    """Keeps variables by their values, in the same memory each time; see Handler and checkpoint.arrays.Variables."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables
        self._saved = [np.array(view_of(one)) for one in variables]

    def save(self) -> None:
        for kept, one in zip(self._saved, self._variables, strict=True):
            np.copyto(kept, view_of(one))

    def restore(self) -> None:
        self.assign(self._saved)

    def sync(self) -> None:
        broadcast_variables(self._variables, root_rank=0)

    def arrays(self) -> Sequence[Array]:
        return self._saved

    def assign(self, arrays: Sequence[Array]) -> None:
        for variable, value in zip(self._variables, arrays, strict=True):
            variable.assign(value)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(func: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """Make a function that trains one that goes on when ranks come, end or fail, see hvdkit.elastic.run.run.

    A collective that fails inside a graph raises an error of TensorFlow's there; it is taken for what it is.
    """

    @functools.wraps(func)
    def train(state: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError:
            raise  # in eager mode they are errors of TensorFlow's as well
        except tf.errors.OpError as error:
            if (found := behind(error)) is not None:
                raise found from error
            if isinstance(error, tf.errors.UnknownError) and "Horovod" in error.message:  # of Horovod's core
                raise HorovodInternalError(error.message) from error
            raise

    return cast(Callable[Concatenate[Any, Arguments], Result], run_elastic(train))


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":  # needs Keras, and stands above this floor
        return importlib.import_module("hvdkit.keras.elastic").KerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
