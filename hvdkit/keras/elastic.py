"""Training that can be taken up again: `hvd.elastic.KerasState`, callbacks that keep it, and `hvd.elastic.run`.

Worlds shrink and grow under `hvdrun --elastic`, and where Horovod's core is the engine under `horovodrun --min-np`. In
others they do what Horovod's do there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.elastic.run import run as run_elastic
from hvdkit.elastic.state import Handler, ObjectState
from hvdkit.keras.objects import broadcast_object
from hvdkit.keras.state import broadcast_variables, sync_state


class KerasState(ObjectState):
    """What is to be kept of a training: `state = hvd.elastic.KerasState(model, epoch=0, batch=0)`.

    Each argument is an attribute: `state.model`, `state.epoch += 1`. `commit` saves them in memory, `restore` goes back
    to what was committed, `sync` gives every rank rank 0's and saves them. Models and optimizers stay the objects they
    are, and only their variables are saved and sent; other values are copied and pickled as a whole.

    optimizer: the model's own if None. Build both before: `model.fit` does, and so does `optimizer.build`.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(broadcast_object, model=model, optimizer=optimizer, **kwargs)

    def handler_for(self, value: Any) -> Handler | None:
        """See ObjectState.handler_for."""
        if isinstance(value, keras.Model):
            return _Variables(value, "weights")
        if isinstance(value, keras.optimizers.Optimizer):
            return _Variables(value, "variables")
        return None


class _Variables:
    """Keeps a thing by the variables that an attribute of it lists."""

    def __init__(self, owner: Any, attribute: str) -> None:
        self._owner, self._attribute = owner, attribute
        self.save()

    def _list(self) -> list[Any]:
        if isinstance(self._owner, keras.Model):
            sync_state(self._owner)
        return list(getattr(self._owner, self._attribute))

    def save(self) -> None:
        self._saved = [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._list()]

    def restore(self) -> None:
        for variable, value in zip(self._list(), self._saved, strict=False):
            variable.assign(value)

    def sync(self) -> None:
        broadcast_variables(self._list())


class CommitStateCallback(keras.callbacks.Callback):
    """Commit a state after every `batches_per_commit` batches, and at the end of an epoch."""

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is time."""
        if (batch + 1) % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep `state.batch`: the batch to go on with, 0 at the end of an epoch. Put it before CommitStateCallback."""

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep `state.epoch`: the epoch to go on with. Put it before CommitStateCallback.

    fit() may be called with initial_epoch=state.epoch, so that its numbers are those of the whole training.
    """

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self.state.epoch = epoch + 1


#: Its name in Horovod for Keras 2 and TensorFlow.
TensorFlowKerasState = KerasState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that trains one that goes on when ranks come, end or fail, see hvdkit.elastic.run.run."""
    if keras.backend.backend() != "tensorflow":
        return run_elastic(func)
    from hvdkit.tensorflow.elastic import run as run_on_tensorflow  # where errors of graphs are TensorFlow's

    return run_on_tensorflow(func)
