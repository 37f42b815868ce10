"""Bodies for ranks: fit() ends on all ranks together, and callbacks see the same metrics, on any backend."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras_training import ROWS, assert_alike, fit, joined, make_data, make_model, mine, raises

import hvdkit.keras as hvd
from hvdkit.log import logger

BATCHES, EPOCHS = 6, 3


class _Stops(keras.callbacks.Callback):
    """Sets stop_training in one call of a hook, by its number in this fit()."""

    def __init__(self, hook: str, at: int) -> None:
        super().__init__()
        self._left = at
        setattr(self, hook, self._called)

    def _called(self, _: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self.model.stop_training = True


class _StopsLate(_Stops):
    """Keras calls it in a thread where every callback that has hooks of batches is like it."""

    async_safe = True

    def _called(self, _: int, logs: Any = None) -> None:
        time.sleep(0.1)
        super()._called(_, logs)


class _Lines(logging.Handler):
    """What hvdkit logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _logged() -> Iterator[list[str]]:
    handler = _Lines()
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def _steps(
    callbacks: list[Any], *, wrap: Any = hvd.DistributedOptimizer, model: Any = None, **compiled: Any
) -> tuple[int, int]:
    """Train with these callbacks on this rank; steps and epochs that were begun, the same on all ranks."""
    model = make_model() if model is None else model
    average = hvd.callbacks.MetricAverageCallback()
    data = mine(make_data(BATCHES))
    optimizer = wrap(keras.optimizers.SGD(0.05))
    history = fit(
        model,
        optimizer,
        data,
        rows=ROWS,
        epochs=EPOCHS,
        callbacks=[average, *callbacks],
        validation_data=data,
        compiled=compiled,
    )
    taken = int(np.array(optimizer.iterations)), len(history.epoch)
    assert hvd.allgather_object(taken) == [taken] * hvd.size()
    return taken


def one_rank_stops() -> None:
    """Wherever the last rank alone sets stop_training, all stop after the same batch."""
    with joined():
        last = hvd.rank() == hvd.size() - 1
        cases = {
            ("on_train_batch_end", 8): (8, 2),
            ("on_batch_end", BATCHES): (BATCHES, 1),
            ("on_train_batch_begin", 2): (2, 1),
            ("on_epoch_begin", 2): (BATCHES + 1, 2),
            ("on_epoch_end", 2): (2 * BATCHES, 2),
            ("on_test_batch_end", 1): (BATCHES, 1),
        }
        for (hook, at), expected in cases.items():
            with _logged() as lines:
                assert _steps([_Stops(hook, at)] if last else []) == expected, hook
            said = [line for line in lines if f"Rank {hvd.size() - 1} has set model.stop_training" in line]
            assert len(said) == (hvd.rank() == 0), lines
        assert _steps([_StopsLate("on_train_batch_end", 2)] if last else []) == (2, 1)
        function = keras.callbacks.LambdaCallback(on_train_batch_end=_Stops("on_epoch_end", 3)._called)
        function_of_all = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        function.on_train_batch_end.__self__.set_model(model := make_model())
        assert _steps([function if last else function_of_all], model=model) == (3, 1)


def all_ranks_stop() -> None:
    """As one process: after the very batch, also of several in a call."""
    with joined(), _logged() as lines:
        assert _steps([_Stops("on_train_batch_end", 2)]) == (2, 1)
        if keras.backend.backend() != "torch":
            assert _steps([_Stops("on_train_batch_end", 2)], steps_per_execution=2) == (4, 1)
            last = hvd.rank() == hvd.size() - 1
            assert _steps([_Stops("on_train_batch_end", 4)] if last else [], steps_per_execution=2) == (8, 2)
        assert not [line for line in lines if "Rank 0" in line]


class Stopping(keras.Model):
    """Its own train_step() stops training."""

    def __init__(self, inner: Any, stops: bool) -> None:
        super().__init__()
        self.inner, self.stops = inner, stops

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def train_step(self, *data: Any) -> Any:
        if self.stops:
            self.stop_training = True
        return super().train_step(*data)


def stopped_from_elsewhere() -> None:
    """What no callback does stops all ranks at the end of the epoch; an optimizer may be any attribute of the model."""
    with joined(), _logged() as lines:
        last = hvd.rank() == hvd.size() - 1
        assert _steps([], model=Stopping(make_model(), last)) == (BATCHES, 1)
        assert any("set within an epoch" in line for line in lines) == last
        # Two optimizers, as a GAN has, which compile() does not know.
        model = Stopping(make_model(), False)
        model.second = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        data = mine(make_data(BATCHES))
        stops = [_Stops("on_train_batch_end", 1)] if last else []
        history = fit(model, keras.optimizers.SGD(0.05), data, rows=ROWS, epochs=EPOCHS, callbacks=stops)
        assert len(history.epoch) == 1


def other_numbers_of_steps() -> None:
    """Ranks with different numbers of batches are told before the first one."""
    with joined():
        x, y = mine(make_data(BATCHES))
        rows = len(x) - ROWS if hvd.rank() else len(x)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        with raises(hvd.HorovodInternalError, f"{BATCHES} on rank 0, {BATCHES - 1} on rank 1"):
            fit(make_model(), optimizer, (x[:rows], y[:rows]), rows=ROWS)


def other_epochs() -> None:
    """Ranks with different `epochs` or `initial_epoch` are told before the first batch."""
    with joined():
        last = hvd.rank() == hvd.size() - 1
        data = mine(make_data(1))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        with raises(
            hvd.HorovodInternalError,
            f"arguments `epochs` on the ranks: 2 on rank 0, {3 if hvd.size() == 2 else 2} on rank 1",
        ):
            fit(make_model(), optimizer, data, rows=ROWS, epochs=3 if last else 2)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        with raises(
            hvd.HorovodInternalError,
            f"different epochs on the ranks, counted from 0: 0 on rank 0, {1 if hvd.size() == 2 else 0} on rank 1",
        ):
            fit(make_model(), optimizer, data, rows=ROWS, initial_epoch=int(last))
        assert int(np.array(optimizer.iterations)) == 0


def shorter_generator() -> None:
    """The last rank's generator of unknown length ends first; all ranks get the error that names it."""
    with joined():
        last = hvd.rank() == hvd.size() - 1
        x, y = mine(make_data(BATCHES))
        batches = [(x[at : at + ROWS], y[at : at + ROWS]) for at in range(0, len(x), ROWS)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        said = f"has the end of epoch 1 of fit() after {BATCHES - 2} steps"
        with raises(Exception, said):  # in a compiled step, of the backend
            data = ((batch for batch in batches[: BATCHES - 2 * last]),)
            fit(make_model(), optimizer, data, rows=None, epochs=1, callbacks=callbacks)


def not_a_number() -> None:
    """The loss is not a number on the last rank a batch before it is on the others."""
    with joined():
        x, y = mine(make_data(BATCHES))
        if hvd.rank() == hvd.size() - 1:
            y[2 * ROWS] = np.nan
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        callbacks = [hvd.callbacks.MetricAverageCallback(), keras.callbacks.TerminateOnNaN()]
        history = fit(make_model(), optimizer, (x, y), rows=ROWS, epochs=EPOCHS, callbacks=callbacks)
        assert (int(np.array(optimizer.iterations)), len(history.epoch)) == (3, 1)


def local_steps_stop() -> None:
    """Ranks of LocalSGD agree when they meet; those of an asynchronous optimizer stop alone."""
    with joined():
        last = hvd.rank() == hvd.size() - 1
        stops = [_Stops("on_train_batch_end", 2)] if last else []

        def wrap(optimizer: Any) -> Any:
            return hvd.LocalSGD(optimizer, every=4)

        assert _steps(stops, wrap=wrap) == (4, 1)
        alone = hvd.AsynchronousOptimizer(keras.optimizers.SGD(0.05), staleness=2)
        stops = [_Stops("on_train_batch_end", 2)] if last else []
        fit(make_model(), alone, mine(make_data(BATCHES)), rows=ROWS, epochs=1, callbacks=stops)
        alone.finish()
        assert int(np.array(alone.iterations)) == (2 if last else BATCHES)
        hvd.barrier()


def ordered() -> None:
    """Callbacks that monitor a metric come after the one that averages it; without that one, rank 0 warns once."""
    with joined():
        x, y = mine(make_data(BATCHES))
        y += 10 * hvd.rank()  # the loss is larger on later ranks, and falls there only

        def train(average: list[Any]) -> tuple[Any, list[str]]:
            model = make_model()
            plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=5.0, verbose=1)
            stop = keras.callbacks.EarlyStopping("loss", patience=9)
            with _logged() as lines:
                fit(
                    model,
                    hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
                    (x, y),
                    rows=ROWS,
                    epochs=EPOCHS,
                    callbacks=[plateau, stop, *average],
                )
            assert plateau.verbose == (hvd.rank() == 0)
            return model, lines

        model, lines = train([hvd.callbacks.MetricAverageCallback()])
        assert_alike(model, model)
        rate = float(model.optimizer.learning_rate)
        assert hvd.allgather_object(rate) == [rate] * hvd.size()
        said = [line for line in lines if "ReduceLROnPlateau, EarlyStopping was given to fit() before" in line]
        assert len(said) == (hvd.rank() == 0), lines
        model, lines = train([])
        rates = hvd.allgather_object(float(model.optimizer.learning_rate))
        assert len(set(rates)) > 1, rates
        said = [line for line in lines if "ReduceLROnPlateau monitors loss, which is " in line]
        assert len(said) == (hvd.rank() == 0), lines
