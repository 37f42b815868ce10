"""Elastic training: `hvd.elastic.KerasState`, callbacks that update it, and `hvd.elastic.run`.

Worlds shrink and grow under `hvdrun --elastic`, and under `horovodrun --min-np` with Horovod's core as engine. In other
worlds the calls do the same as Horovod's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from hvdkit.checkpoint.store import Store
from hvdkit.elastic.run import run as run_elastic
from hvdkit.elastic.state import Handler, ObjectState
from hvdkit.engine import runtime as engine
from hvdkit.errors import ConfigError
from hvdkit.keras import checkpoint
from hvdkit.keras.periodic import SavedPeriodicOptimizer, strategy_of
from hvdkit.keras.replicas import find_sync
from hvdkit.keras.sharding.optimizer import find_sharded
from hvdkit.keras.sharding.saved import SavedShards
from hvdkit.keras.state import allgather_object, broadcast_object, saved_variables, sync_state


class KerasState(ObjectState):
    """The state of an elastic training: `state = hvd.elastic.KerasState(model, epoch=0, batch=0)`.

    Each argument is an attribute: `state.model`, `state.epoch += 1`. `commit` saves all of them in memory, `restore`
    returns to the last commit, `sync` broadcasts those of rank 0 and commits them. For models and optimizers only their
    variables are saved and sent; other values are copied and pickled as a whole. Metrics and the seeds of dropout are
    not saved. For an optimizer with shard=... save() and commit() are collective, and each rank keeps the whole state
    in host memory; sync() divides it among the present ranks.

    optimizer: None: that of the model. KerasState() builds it if necessary. Raises ValueError for a model that has no
    weights yet.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if isinstance(model, keras.Model) and not model.built:
            raise ValueError(
                "KerasState(): the model has no weights yet. Start it with keras.Input, or call model.build() first."
            )
        if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(broadcast_object, model=model, optimizer=optimizer, **kwargs)

    def handler_for(self, value: Any) -> Handler | None:
        if strategy_of(value) is not None:
            return SavedPeriodicOptimizer(value)
        if isinstance(value, keras.optimizers.Optimizer) and (sharded := find_sharded(value)) is not None:
            return SavedShards(value, sharded)
        return saved_variables(value) if isinstance(value, keras.Model | keras.optimizers.Optimizer) else None

    def save(self) -> None:
        for value in self.present().values():
            if isinstance(value, keras.Model):
                sync_state(value)
        super().save()

    def sync(self) -> None:
        """See State.sync.

        A new rank traces its step when it first calls fit(), even without data; on TensorFlow tracing is collective. So
        the other ranks trace their steps again. Do not call it within fit().
        """
        super().sync()
        models = [value for value in self.present().values() if isinstance(value, keras.Model)]
        traced = allgather_object([model.train_function is not None for model in models])
        for model, is_traced in zip(models, zip(*traced, strict=True), strict=True):
            if not all(is_traced):
                model.train_function = None

    def reset(self) -> None:
        """See State.reset. Discards steps that were compiled for another number of ranks."""
        for name in self._handlers:
            model = getattr(self, name)
            sync = find_sync(model) if isinstance(model, keras.Model) else None
            if sync is not None and sync.is_traced_with_ranks:
                model.train_function = None

    def open_store(self, directory: str) -> Store:
        """See State.open_store. Raises ValueError for a value that is not a model, optimizer, number or string."""
        for value in self.present().values():
            if isinstance(value, keras.optimizers.Optimizer) and (sharded := find_sharded(value)) is not None:
                sharded._hvdkit_divide()
        return checkpoint.open_store(directory, self.present())


class CommitStateCallback(keras.callbacks.Callback):
    """Commit a state after every `batches_per_commit` batches, and at the end of an epoch."""

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if a commit is due."""
        if (batch + 1) % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the state."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Set `state.batch` to the number of finished batches of the epoch, 0 at its end.

    Put it before CommitStateCallback. fit() starts every epoch with its first batch; to resume within an epoch, pass
    only the rest of its data.
    """

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Set the batch number; some batches may be done already."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the finished batch."""
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set the batch number to 0."""
        self.state.batch = self._before = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Set `state.epoch` to the number of finished epochs. Put it before CommitStateCallback.

    Call fit(epochs=epochs, initial_epoch=state.epoch). fit(epochs=epochs - state.epoch), as in scripts for Horovod,
    also works, but counts epochs from 0 after each restart.
    """

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the finished epoch."""
        self.state.epoch += 1


#: Horovod's name for it with Keras 2 and TensorFlow.
TensorFlowKerasState = KerasState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function restart from the last commit when ranks come, end or fail; see hvdkit.elastic.run.run.

    On JAX it raises ConfigError under `hvdrun --elastic`, where that is impossible.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from hvdkit.tensorflow.tracing import raise_what_failed

        return run_elastic(raise_what_failed(func))
    if backend != "jax":
        return run_elastic(func)

    @functools.wraps(func)
    def train(*args: Any, **kwargs: Any) -> Any:
        if engine.runtime("elastic.run").config.elastic:
            raise ConfigError(
                "hvd.elastic.run: Keras on JAX cannot continue after a rank has failed, because a compiled step that "
                "failed cannot be resumed. Set KERAS_BACKEND=tensorflow or torch, or remove --elastic, --min-np and "
                "--max-np."
            )
        return run_elastic(func)(*args, **kwargs)

    return train
