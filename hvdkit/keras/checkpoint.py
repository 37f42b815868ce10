"""Checkpoints of a training with Keras, on any backend: `hvd.checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdkit.checkpoint.arrays import CheckpointableArrays, SavedVariables, digest_of
from hvdkit.checkpoint.checkpoints import TrainingCheckpoints, refuse_options
from hvdkit.checkpoint.store import Store
from hvdkit.engine import runtime as engine
from hvdkit.errors import Preempted
from hvdkit.keras.backends import settle
from hvdkit.keras.sharding.optimizer import find_sharded
from hvdkit.keras.state import broadcast_model, equal_variables, saved_variables, sync_state
from hvdkit.keras.weights_file import check_weights_file

__all__ = ["Checkpoints", "Preempted", "load", "save"]

_FILE = "model.weights.h5"
_EPOCH = "epoch"


class Checkpoints(TrainingCheckpoints):
    """Checkpoints of a training: `checkpoints = Checkpoints("checkpoints", model=model)`.

    Then call `model.fit(..., initial_epoch=checkpoints.load_epoch(), callbacks=[..., checkpoints.callback()])`. It
    saves a checkpoint every `every_s` seconds, and when a rank gets SIGTERM, SIGUSR1 or SIGUSR2; that ends the training
    with exit code 75. In your own training loop, call load(), step(), save() and close().

    directory: used by this training only, on a disk that outlives the job; only rank 0 needs access.
    model: built; the state of its optimizer is saved with it.
    every_s: seconds between checkpoints.
    keep: number of the newest checkpoints to keep.
    values: numbers and strings, which are then in `values`; the name "epoch" is used by the callback.

    Raises TypeError for one whose name is a misspelt option, such as every=60.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: keras.Model,
        every_s: float = 600.0,
        keep: int = 3,
        **values: Any,
    ) -> None:
        super().__init__(directory, KerasKept(model), {_EPOCH: 0, **values}, every_s=every_s, keep=keep)

    def load_epoch(self) -> int:
        """Load the newest checkpoint and return the epoch to continue with; a collective call."""
        self.load()
        return int(self.values[_EPOCH])

    def callback(self) -> keras.callbacks.Callback:
        """The callback for fit(): pass it on every rank, after callbacks that change the model or the learning rate."""
        return _Callback(self)


class _Callback(keras.callbacks.Callback):
    """Saves due checkpoints between batches. An interrupted epoch restarts, with the weights reached so far."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        super().__init__()
        self._checkpoints = checkpoints

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if a checkpoint is due, and end the training if the job must end."""
        self._checkpoints.step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the finished epoch."""
        self._checkpoints.values[_EPOCH] = epoch + 1

    def on_train_end(self, logs: Any = None) -> None:
        """Save the final state, and return when it is on disk."""
        self._checkpoints.save()
        self._checkpoints.close()


def save(directory: str | os.PathLike[str], *, model: keras.Model, keep: int = 3, **values: Any) -> None:
    """Save a checkpoint and return when it is on disk; a collective call. Arguments: as for Checkpoints.

    Raises CheckpointError, on rank 0, if it could not be written.
    """
    refuse_options(values)
    store = Store(directory, KerasKept(model), values, keep=keep)
    store.save()
    store.wait()


def load(directory: str | os.PathLike[str], *, model: keras.Model, **values: Any) -> dict[str, Any] | None:
    """Load the newest complete checkpoint on all ranks; a collective call. Arguments: as for Checkpoints.

    Returns the values as they were saved; None if there is no checkpoint. Raises what Checkpoints.load() raises.
    """
    store = Store(directory, KerasKept(model), values, keep=1)
    return store.values if store.load() else None


def open_store(directory: str | os.PathLike[str], things: Mapping[str, Any]) -> Store:
    """Open a store of named objects: a "model", other models, optimizers, numbers and strings."""
    model: keras.Model = things["model"]
    with_variables = {
        name: thing for name, thing in things.items() if isinstance(thing, keras.Model | keras.optimizers.Optimizer)
    }
    own = (model, getattr(model, "optimizer", None))
    others = {
        name: saved_variables(thing) for name, thing in with_variables.items() if all(thing is not part for part in own)
    }
    values = {name: thing for name, thing in things.items() if name not in with_variables}
    return Store(directory, KerasKept(model, others), values, keep=3)


class KerasKept:
    """A model, with its optimizer; see Checkpointable. Its file is that of model.save_weights(), which contains both.

    others: more variables, by name, for a second file.
    """

    framework = f"keras {keras.__version__} on {keras.backend.backend()}"

    def __init__(self, model: keras.Model, others: Mapping[str, SavedVariables] | None = None) -> None:
        self._model = model
        self._others = CheckpointableArrays(self.framework, others) if others else None
        if model.built and find_sharded(getattr(model, "optimizer", None)) is not None:
            self._build_optimizer()  # on all ranks together, as only rank 0 calls read()
        self.files: Sequence[str] = (_FILE, *(self._others.files if self._others else ()))

    def collect(self) -> None:
        """See Checkpointable.collect. Every rank has the whole state, except a divided optimizer's."""
        sharded = find_sharded(getattr(self._model, "optimizer", None))
        if sharded is not None:
            sync_state(self._model)
            sharded._hvdkit_gather(keep=engine.runtime("save()").world.rank == 0)

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        """See Checkpointable.copy. Keras writes from the model itself, so the copy is the file."""
        sync_state(self._model)
        self._model.save_weights(folder / _FILE)
        sharded = find_sharded(getattr(self._model, "optimizer", None))
        if sharded is not None:
            sharded._hvdkit_release()
        return self._others.copy(folder, during_epoch=during_epoch) if self._others else lambda: None

    def read(self, folder: Path) -> None:
        """See Checkpointable.read. Raises ValueError for a model that has not been built."""
        if not self._model.built:
            raise ValueError("the model has no weights yet. Start it with keras.Input, or call model.build() first")
        self._build_optimizer()
        check_weights_file(folder / _FILE)
        self._model.load_weights(folder / _FILE)
        if self._others:
            self._others.read(folder)

    def share(self) -> None:
        self._build_optimizer()
        broadcast_model(self._model)
        if self._others:
            self._others.share()

    def _build_optimizer(self) -> None:
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self._model.trainable_variables)

    def digests(self) -> dict[str, str]:
        digests = {"model": _digest(self._model.weights), "optimizer": _digest(equal_variables(self._model))}
        return {**digests, **(self._others.digests() if self._others else {})}

    def record(self, samples: int | None) -> None:
        """See Checkpointable.record. Does nothing: Keras has no sampler."""

    def read_random(self) -> dict[str, Any]:
        """See Checkpointable.read_random. Returns the seeds (as of dropout), which are variables of the model."""
        sync_state(self._model)
        return {"seeds": [keras.ops.convert_to_numpy(one).tolist() for one in self._seeds()]}

    def set_random(self, state: dict[str, Any]) -> None:
        for variable, value in zip(self._seeds(), state["seeds"], strict=True):
            variable.assign(np.array(value, variable.dtype))

    def _seeds(self) -> list[Any]:
        known = {id(one) for one in self._model.weights}
        return [one for one in self._model.variables if id(one) not in known and "seed" in one.name]

    def settle(self) -> None:
        settle()


def _digest(variables: list[Any]) -> str:
    return digest_of([np.asarray(keras.ops.convert_to_numpy(one)) for one in variables])
