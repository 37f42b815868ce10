"""Bodies for ranks: training that goes on from `.h5` files."""

from __future__ import annotations

import importlib
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import keras
import keras_2_models
import numpy as np
from keras_training import ROWS, assert_alike, fit, joined, make_data, make_model, mine, raises

import hvdkit.keras as hvd
from hvdkit.keras import saved_models

h5py: Any = importlib.import_module("h5py")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"clipnorm": 1.0, "amsgrad": True},
    "AdamW": {"use_ema": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Nadam": {},
    "Ftrl": {},
    "Lion": {"gradient_accumulation_steps": 2},
    "Lamb": {},
}


def _state(optimizer: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(one)) for one in optimizer.variables]


def _assert_equal(one: list[Any], two: list[Any]) -> None:
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def _save(model: Any, path: str) -> None:
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()


def resumed(folder: str, names: list[str]) -> None:
    """From a file training goes on as if it had never stopped, and the optimizer is what it was."""
    with joined():
        part = mine(make_data(batches=4))
        for name in names:
            path = str(Path(folder, f"{name}.h5"))
            model = make_model()
            rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8) if name == "SGD" else 0.01
            options = dict(OPTIMIZERS[name])
            if keras.backend.backend() == "jax":
                options.pop("use_ema", None)  # Keras 3.15 fails in any second fit() with it on JAX
            optimizer = hvd.DistributedOptimizer(getattr(keras.optimizers, name)(rate, **options))
            fit(model, optimizer, part, rows=ROWS, epochs=1)
            if name == "Adam":
                optimizer.learning_rate = 0.005
            _save(model, path)
            again = hvd.load_model(path)
            assert int(again.optimizer.iterations) == int(optimizer.iterations) > 0, name
            _assert_equal(_state(again.optimizer), _state(optimizer))
            for one in (model, again):
                one.fit(*part, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
            assert_alike(again, model, 0.0)
            hvd.barrier()


def resumed_otherwise(folder: str) -> None:
    """Rank 0 alone loads and the others get it; objects of the script; mixed precision; what had not been trained."""
    with joined():
        part, path = mine(make_data(batches=4)), str(Path(folder, "model.h5"))

        class Slow(keras.optimizers.SGD):  # type: ignore[misc]
            pass

        def own_loss(truth: Any, predicted: Any) -> Any:
            return keras.ops.mean(keras.ops.square(truth - predicted) + 1.0)

        def optimizer() -> Any:
            return hvd.DistributedOptimizer(Slow(0.05, momentum=0.9))

        model = make_model()
        model.compile(optimizer(), own_loss, metrics=["mae", own_loss])
        options: dict[str, Any] = {"batch_size": ROWS, "epochs": 1, "shuffle": False, "verbose": 0}
        model.fit(*part, **options)
        _save(model, path)
        fp16 = hvd.Compression.fp16
        if hvd.rank() == 0:
            again = hvd.load_model(path, [Slow], {"own_loss": own_loss}, fp16)
            assert type(again.optimizer).__name__ == "Slow"
        else:
            again = make_model()
            again.compile(hvd.DistributedOptimizer(Slow(0.05, momentum=0.9), compression=fp16), own_loss)
        history = again.fit(*part, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], **options).history
        assert hvd.rank() or set(history) == {"loss", "mae", "own_loss"}, history
        model.fit(*part, **options)
        assert_alike(again, model, 0.0)  # on one host nothing is compressed

        keras.config.set_dtype_policy("mixed_float16")
        model = make_model()
        fit(model, hvd.DistributedOptimizer("adam"), part, rows=ROWS, epochs=1)
        _save(model, path)
        again = hvd.load_model(path)
        assert isinstance(again.optimizer, keras.optimizers.LossScaleOptimizer)
        _assert_equal(_state(again.optimizer), _state(model.optimizer))
        for one in (model, again):
            one.fit(*part, **options)
        assert_alike(again, model, 0.0)

        for policy in ("mixed_float16", "float32"):
            keras.config.set_dtype_policy(policy)
            model = make_model()
            model.compile(keras.optimizers.Adam(0.125), "mse")
            path = str(Path(folder, f"{policy}.h5"))
            _save(model, path)
            again = hvd.load_model(path)
            inner = getattr(again.optimizer, "inner_optimizer", again.optimizer)
            assert int(inner.iterations) == 0 and float(inner.learning_rate) == 0.125
            if inner is not again.optimizer:
                assert float(again.optimizer.dynamic_scale) == again.optimizer.initial_scale
        fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.125)), part, rows=ROWS, epochs=1)
        again.fit(*part, **options)
        assert_alike(again, model, 0.0)
        hvd.barrier()


def from_keras_2() -> None:
    """Files of Keras 2 go on as Keras 2 would; each rank has the whole data, so that their average is one process's."""
    with joined(), zipfile.ZipFile(keras_2_models.MODELS) as archive, tempfile.TemporaryDirectory() as folder:
        for name in keras_2_models.OPTIMIZERS:
            model = hvd.load_model(archive.extract(f"{name}.h5", folder))
            assert int(model.optimizer.iterations) == 6, name
            batch = keras_2_models.BATCH
            model.run_eagerly = keras.backend.backend() != "torch"  # tracing costs more than these few steps
            history = model.fit(*keras_2_models.data(), batch_size=batch, epochs=2, shuffle=False, verbose=0).history
            assert set(history) == {"loss", "accuracy"}
            expected = np.load(archive.extract(f"{name}.npz", folder))
            for one, of in zip(model.get_weights(), expected.files, strict=True):
                np.testing.assert_allclose(one, expected[of], rtol=0, atol=5e-6, err_msg=name)


def refused(folder: str) -> None:
    """What does not fit is an error that says what to do, on every rank."""
    with joined():
        part, path = mine(make_data(batches=2)), str(Path(folder, "model.h5"))
        model = make_model()
        fit(model, hvd.DistributedOptimizer("adam"), part, rows=ROWS, epochs=1)
        _save(model, path)
        if hvd.rank() == 0:
            model = hvd.load_model(path)
        else:
            model = make_model()
            model.compile(hvd.DistributedOptimizer("adam"), "mse")
        with raises(hvd.HorovodInternalError, "call hvd.load_model() on every rank"):
            hvd.broadcast_model(model)
        if hvd.rank():
            model.optimizer.build(model.trainable_variables)
        hvd.broadcast_model(model)
        assert int(model.optimizer.iterations) == 2

        model.layers[0].trainable = False  # after the optimizer was built: the file says that it is not trained
        _save(model, path)
        with raises(ValueError, "the file holds 10 variables, but the optimizer has 6"):
            hvd.load_model(path)
        hvd.barrier()


def still_written(folder: str) -> None:
    """A file that is locked or written in part is waited for; one that does not change is an error."""
    with joined():
        whole, path = Path(folder, "whole"), Path(folder, "path")
        for ending in (".h5", ".keras"):
            source, target = str(whole.with_suffix(ending)), path.with_suffix(ending)
            model = make_model()
            fit(model, hvd.DistributedOptimizer("adam"), mine(make_data(batches=2)), rows=ROWS, epochs=1)
            _save(model, source)
            content = Path(source).read_bytes()
            parts = [content[at : at + len(content) // 3 + 1] for at in range(0, len(content), len(content) // 3 + 1)]
            if hvd.rank() == 0:
                with target.open("wb") as file:
                    for at, part in enumerate(parts):
                        file.write(part)
                        file.flush()
                        if at == 0:
                            hvd.barrier()
                        time.sleep(0.3)
            else:
                hvd.barrier()
            again = hvd.load_model(target)
            _assert_equal(_state(again.optimizer), _state(model.optimizer))
            assert_alike(again, model, 0.0)
            hvd.barrier()

        locked = str(Path(folder, "locked.h5"))
        if hvd.rank() == 0:
            with h5py.File(locked, "w") as file:
                hvd.barrier()
                time.sleep(0.3)
                with h5py.File(whole.with_suffix(".h5"), "r") as source_file:
                    for name in source_file:
                        source_file.copy(name, file)
                    file.attrs.update(source_file.attrs)
        else:
            hvd.barrier()
        assert int(hvd.load_model(locked).optimizer.iterations) == 2

        patience, saved_models.PATIENCE_S = saved_models.PATIENCE_S, 0.2
        try:
            for ending in (".h5", ".keras"):
                target = path.with_suffix(ending)
                if hvd.rank() == 0:
                    target.write_bytes(target.read_bytes()[:2000])
                hvd.barrier()
                with raises(OSError, f"{target} (2000 bytes) is incomplete and has not changed for 0 s"):
                    hvd.load_model(target)
        finally:
            saved_models.PATIENCE_S = patience
        hvd.barrier()
