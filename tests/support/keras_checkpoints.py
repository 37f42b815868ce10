"""Bodies for ranks that save and load checkpoints with Keras."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_training import joined, make_data, raises

import hvdkit.keras as hvd
from hvdkit.checkpoint import agreement
from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.errors import CheckpointError

EPOCHS = 3


def make_model() -> Any:
    """With dropout, whose random numbers differ between ranks, and Adam, which has a state."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(20, activation="tanh"), keras.layers.Dropout(0.5, seed=3 + hvd.rank())]
    model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return model


class _Signal(keras.callbacks.Callback):
    """Sends this rank a signal at the end of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            os.kill(os.getpid(), signal.SIGTERM)


def train(directory: Path, signal_after: int = -1) -> tuple[int, list[Any]]:
    """Train, or go on; returns the first epoch of this run, or exit code, and weights and optimizer afterwards."""
    with joined():
        x, y = hvd.shard(make_data())
        model = make_model()
        checkpoints = hvd.checkpoint.Checkpoints(directory, model=model)
        begin = checkpoints.load_epoch()
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if hvd.rank() == 1 and signal_after >= 0:
            callbacks.append(_Signal(signal_after))
        callbacks.append(checkpoints.callback())
        most, agreement._MOST_STEPS = agreement._MOST_STEPS, 1  # there are few
        try:
            model.fit(
                x,
                y,
                batch_size=4,
                epochs=EPOCHS,
                initial_epoch=begin,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )
        except hvd.checkpoint.Preempted as ended:
            begin = int(str(ended.code))
        finally:
            agreement._MOST_STEPS = most
        checkpoints.close()
        variables = [*model.weights, *model.optimizer.variables]
        return begin, [np.asarray(keras.ops.convert_to_numpy(one), np.float64).tolist() for one in variables]


def save_and_load(directory: Path) -> dict[str, Any] | None:
    """A fresh model on each rank takes what was saved, with the state of the optimizer; the newest is damaged."""
    with joined():
        model = make_model()
        assert hvd.checkpoint.load(directory, model=model, best=0.0) is None
        x, y = hvd.shard(make_data())
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        hvd.checkpoint.save(directory, model=model, best=0.5)
        expected = [np.array(keras.ops.convert_to_numpy(one)) for one in (*model.weights, *model.optimizer.variables)]
        hvd.checkpoint.save(directory, model=model, best=0.75)
        hvd.barrier()
        if hvd.rank() == 0:
            with (directory / "checkpoint-000002" / "model.weights.h5").open("r+b") as file:
                file.truncate(100)
        hvd.barrier()
        other = make_model()
        _refuse_crafted(directory.with_name(f"{directory.name}-crafted"), other)
        found = hvd.checkpoint.load(directory, model=other, best=0.0)
        for variable, value in zip([*other.weights, *other.optimizer.variables], expected, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
        return found


def _refuse_crafted(directory: Path, model: Any) -> None:
    """Files of weights that need more memory than they have bytes, or that lead to another file."""
    h5py = importlib.import_module("h5py")
    for number, words in enumerate(["its arrays 800000000", "is a SoftLink", "is in another file"]):
        hvd.checkpoint.save(directory / str(number), model=model)
        if hvd.rank() == 0:
            shelf = CheckpointDirectory(directory / str(number))
            folder = shelf.begin()
            shutil.copytree(shelf.folder(1), folder, dirs_exist_ok=True)
            (folder / "manifest.json").unlink()
            with h5py.File(folder / "model.weights.h5", "w") as file:
                if number == 0:
                    file.create_dataset("x", (100_000_000,), "f8", chunks=(1000,))
                elif number == 1:
                    file["x"] = h5py.SoftLink("/y")
                else:
                    file.create_dataset("x", (9,), "u1", external=[("/etc/passwd", 0, 9)])
            shelf.commit(folder, {})
        hvd.barrier()
        with raises(CheckpointError, words):
            hvd.checkpoint.load(directory / str(number), model=model)


def states(directory: Path) -> None:
    """An elastic state of two models and an optimizer of nobody's goes through a checkpoint; others are refused."""
    with joined():

        def make(seed: float) -> Any:
            model, other = make_model(), keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            loose = keras.optimizers.SGD(0.1, momentum=0.9)
            loose.build(other.trainable_variables)
            state = hvd.elastic.KerasState(model, other=other, loose=loose, epoch=int(seed))
            for one in (*model.weights, *model.optimizer.variables, *other.weights, *loose.variables):
                one.assign(keras.ops.cast(keras.ops.ones(one.shape) * seed, one.dtype))
            return state

        first, second = make(3), make(5)
        first.save_to(str(directory))
        second.load_from(str(directory))
        assert second.epoch == 3
        for name in ("model", "optimizer", "other", "loose"):
            for one in second._handlers[name].variables():
                np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), 3)
        if keras.backend.backend() == "tensorflow":
            import hvdkit.tensorflow as hvd_tensorflow

            variables = [keras.Variable([1.0, 2.0]).value, keras.Variable(7, dtype="int32", trainable=False).value]
            state = hvd_tensorflow.elastic.TensorFlowState(variables, step=4)
            state.save_to(str(directory / "plain"))
            variables[0].assign([0.0, 0.0])
            state.step = 0
            state.load_from(str(directory / "plain"))
            assert state.step == 4 and variables[0].numpy().tolist() == [1.0, 2.0]
