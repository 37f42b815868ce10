"""The steps of keras.Model.fit: a last callback records them; it covers batches of data of any type."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from itertools import count
from threading import Lock
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.epoch_iterator import EpochIterator

from hvdkit.keras.state import sync_state
from hvdkit.tools.compare.recorder.session import Key, Patches, Session
from hvdkit.tools.compare.records import Array, Loader, Step, thin

#: Arguments of an EpochIterator that Keras gives to its data adapter.
_ADAPTED = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")


class Batches(keras.utils.PyDataset):
    """An epoch's batches by number; read on demand, and kept until the next epoch."""

    def __init__(self, adapter: Any, session: Session, number: int, steps: int | None) -> None:
        super().__init__()
        self._adapter, self._session, self._number = adapter, session, number
        self._length = _count(session, number) or steps or adapter.num_batches
        self._epoch = -1
        self._drawn: list[Any] = []
        self._source: Iterator[Any] = iter(())
        self._endless = steps is not None
        self._lock = Lock()
        self.on_epoch_begin()

    def __len__(self) -> int:
        if not self._length:
            raise TypeError("hvdkit compare: the data of fit() has no known length. Pass steps_per_epoch to fit().")
        return int(self._length)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            keys = self._session.batches(self._number, self._epoch)
            if keys:
                return self._session.joined(keys[min(index, len(keys) - 1)])  # later batches are prefetched, never used
            while len(self._drawn) <= index:
                self._drawn.append(next(self._source))
            return self._drawn[index]

    def on_epoch_begin(self) -> None:
        """Start the next epoch; endless data continues."""
        with self._lock:
            self._epoch += 1
            self._drawn = []
            if self._epoch and not self._endless:
                self._adapter.on_epoch_end()
            if not self._epoch or not self._endless:
                self._adapter.on_epoch_begin()
                self._source = iter(self._adapter.get_numpy_iterator())

    def given(self, index: int) -> tuple[Key, Any]:
        """Return a batch of this epoch by number, with its key."""
        return (self._number, self._epoch, index), self[index]


def _count(session: Session, number: int) -> int:
    """Count the batches that the ranks trained on in one epoch, if one rank takes those; 0 otherwise."""
    keys = [key for key in session.given if key[0] == number]
    return 1 + max((key[2] for key in keys), default=-1)


_DROPOUT = ("Dropout", "GaussianDropout", "GaussianNoise", "AlphaDropout", "SpatialDropout1D", "SpatialDropout2D")


def install(session: Session) -> Patches:
    """Record every step of every fit() from now on, until the result is closed."""
    patches, numbers = Patches(), count()
    fit, make = keras.Model.fit, EpochIterator.__init__
    make_list, signature = keras.callbacks.CallbackList.__init__, inspect.signature(make)
    # Recorders: of the fit() that makes its data adapter next, and of the fit() that makes its callbacks next.
    begun: _Recorder | None = None
    adapted: _Recorder | None = None

    def watched_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        session.record.framework = "keras"
        begun = _Recorder(session, next(numbers), self)
        return fit(self, *args, **kwargs)

    def watched_make(self: Any, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal begun, adapted
        recorder, begun = begun, None
        if recorder is None:
            make(self, x, y, *args, **kwargs)
            return
        adapted = recorder
        given = signature.bind(self, x, y, *args, **kwargs)
        given.apply_defaults()
        rest = given.arguments
        adapter = data_adapters.get_data_adapter(**{name: rest[name] for name in _ADAPTED})
        recorder.note(x, rest.get("batch_size") or 32)
        recorder.batches = Batches(adapter, session, recorder.number, rest["steps_per_epoch"])
        recorder.build()
        make(self, recorder.batches, steps_per_execution=rest["steps_per_execution"])

    def watched_make_list(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal adapted
        recorder, adapted = adapted, None
        if recorder is not None:  # after all others, also those of hvdrun --wrap
            callbacks = [*(keras.tree.flatten(callbacks) if callbacks else []), recorder]
        make_list(self, callbacks, *args, **kwargs)

    patches.put(keras.Model, "fit", watched_fit)
    patches.put(EpochIterator, "__init__", watched_make)
    patches.put(keras.callbacks.CallbackList, "__init__", watched_make_list)
    for name in _DROPOUT:
        patches.put(getattr(keras.layers, name), "call", _nothing(session))
    return patches


def _nothing(session: Session) -> Any:
    def call(self: Any, inputs: Any, training: bool = False) -> Any:
        session.record.dropout = True
        return inputs

    return call


class _Recorder(keras.callbacks.Callback):
    """Records one call of fit()."""

    batches: Batches

    def __init__(self, session: Session, number: int, model: keras.Model) -> None:
        super().__init__()
        self.set_model(model)
        self.number = number
        self._session = session
        self._first_rate = self._rate = self._left = 0.0
        self._factor = 1.0

    def note(self, x: Any, batch: int) -> None:
        """Record the number of samples."""
        arrays = keras.tree.flatten(x)
        if arrays and all(hasattr(one, "shape") and len(one.shape) for one in arrays):
            self._session.record.loaders.append(Loader(self.number, len(arrays[0]), batch, drop_last=False))

    def build(self) -> None:
        """Build the variables before the first batch, so that all runs start with equal ones."""
        if not self.model.built:
            first = self.batches[0]
            inputs = first[0] if isinstance(first, tuple) else first
            self.model(keras.tree.map_structure(lambda one: keras.ops.convert_to_tensor(one[:1]), inputs))

    def on_train_begin(self, logs: Any = None) -> None:
        session, record = self._session, self._session.record
        self._first_rate = float(self.model.optimizer.learning_rate)
        layers = self.model._flatten_layers()
        normalise = [one for one in layers if isinstance(one, keras.layers.BatchNormalization)]
        record.batch_norm += [f"BatchNormalization {one.name}" for one in normalise if not one.synchronized]
        if session.ranks is None and record.rank == 0:
            with (session.folder / f"start-{self.number}").open("wb") as file:
                pickle.dump(self.model.get_weights(), file)
        elif session.ranks is not None:
            with (session.ranks / f"start-{self.number}").open("rb") as file:
                start = pickle.load(file)
            own = self.model.get_weights()
            record.other_start |= any((one != other).any() for one, other in zip(own, start, strict=True))
            self.model.set_weights(start)
        record.initial.update(self._read())
        rates = [step.rates[0] for step in session.others[0].steps[len(record.steps) :]] if session.others else []
        if rates and not session.own_rates and not hasattr(self.model.optimizer.learning_rate, "assign"):
            self.model.optimizer.learning_rate = _Given(rates, int(self.model.optimizer.iterations))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        session, optimizer = self._session, self.model.optimizer
        sync_state(self.model)
        number = len(session.record.steps)
        self._rate = float(optimizer.learning_rate)
        self._factor = _norm(_momentums(optimizer)) / self._left if self._left else 1.0
        if session.others and not session.own_rates and number < len(session.others[0].steps):
            wanted = session.others[0].steps[number]
            if hasattr(optimizer.learning_rate, "assign"):
                optimizer.learning_rate.assign(wanted.rates[0])
                self._rate = wanted.rates[0]
            if abs(wanted.momentum - self._factor) > 1e-6:  # a warm-up callback corrects it when it changes the rate
                for one in _momentums(optimizer):
                    one.assign(one * (wanted.momentum / self._factor))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        session = self._session
        key, given = self.batches.given(batch)
        session.got(key, given, None)
        session.trains(None)
        if logs and "loss" in logs:
            session.lost(float(logs["loss"]))
        sync_state(self.model)
        seen = {"rates": [self._rate], "first_rates": [self._first_rate], "momentum": self._factor, **session.take()}
        step = Step(self.number, parameters=self._read(), **seen)
        session.record.steps.append(step)
        self._left = _norm(_momentums(self.model.optimizer))
        if session.done:
            session.write()
            raise SystemExit(0)

    def _read(self) -> dict[str, Array]:
        # Paths contain counters of the created models, which are the same in each run.
        return {one.path: thin(keras.ops.convert_to_numpy(one)) for one in self.model.trainable_variables}


class _Given(keras.optimizers.schedules.LearningRateSchedule):
    """Schedule with the recorded rates of the ranks, in place of a schedule that is part of the compiled step."""

    def __init__(self, rates: list[float], first: int) -> None:
        self._rates, self._first = rates, first

    def __call__(self, step: Any) -> Any:
        at = keras.ops.clip(keras.ops.cast(step, "int32") - self._first, 0, len(self._rates) - 1)
        return keras.ops.take(keras.ops.convert_to_tensor(self._rates, dtype="float32"), at)


def _momentums(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []
    return [one for one in found if one is not None]


def _norm(variables: list[Any]) -> float:
    return float(np.sqrt(sum(float(np.square(keras.ops.convert_to_numpy(one)).sum()) for one in variables)))
