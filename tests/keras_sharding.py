"""Bodies for ranks that train with Keras and divide the optimizer's state."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy as np
from keras_training import (
    ROWS,
    _gradients,
    assert_alike,
    fit,
    fit_alone,
    joined,
    make_data,
    make_model,
    make_optimizer,
    mine,
    raises,
)

import hvdkit.keras as hvd

#: With the options that go through norms, names and numbers that elements share.
SPECS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9, "nesterov": True, "clipnorm": 0.05},
    "Adam": {"name": "Adam", "learning_rate": 0.01, "amsgrad": True, "global_clipnorm": 0.05},
    "AdamW": {"name": "AdamW", "learning_rate": 0.01, "weight_decay": 0.1},
    "Adagrad": {"name": "Adagrad", "learning_rate": 0.05, "clipvalue": 0.01},
    "RMSprop": {"name": "RMSprop", "learning_rate": 0.01, "momentum": 0.5, "centered": True},
    "Lion": {"name": "Lion", "learning_rate": 0.001},
    "Nadam": {"name": "Nadam", "learning_rate": 0.01, "loss_scale_factor": 16.0},
    "Adamax": {"name": "Adamax", "learning_rate": 0.01},
    "Adadelta": {"name": "Adadelta", "learning_rate": 0.5},
    "Ftrl": {"name": "Ftrl", "learning_rate": 0.1},
    "accumulation": {"name": "AdamW", "learning_rate": 0.01, "gradient_accumulation_steps": 2, "global_clipnorm": 0.05},
}
#: Several buckets, whose shards cut variables.
_SETTINGS = {"fusion_bytes": 600, "check_replicas": 2}


def train(specs: list[str], shard: str = "optimizer") -> None:
    """Ranks come to the variables of the same ranks without shard, and to those of one process."""
    with joined(**_SETTINGS):
        for name in specs:
            _train(SPECS[name], shard, alone=name == specs[0])


def _train(spec: dict[str, Any], shard: str, *, alone: bool) -> None:
    data = make_data(batches=4)
    models = []
    for kind in (None, shard):
        model, optimizer = make_model(kernel_constraint="max_norm"), _make(spec)
        if hvd.rank() > 0:
            model.set_weights([3 * weight for weight in model.get_weights()])
        hvd.DistributedOptimizer(optimizer, shard=kind)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, optimizer, mine(data), rows=ROWS, callbacks=[start])
        models.append(model)
    whole, parts = models
    assert_alike(parts, whole, 1e-6)
    assert int(parts.optimizer.iterations) == int(whole.optimizer.iterations)
    _assert_divided(parts.optimizer, whole.optimizer)
    if alone:
        reference = make_model(kernel_constraint="max_norm")
        fit_alone(reference, _make(spec), data)
        assert_alike(parts, reference)


def _make(spec: dict[str, Any]) -> Any:
    optimizer = make_optimizer(spec)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _assert_divided(parts: Any, whole: Any) -> None:
    """The ranks hold together what one did, and each one element more for each slot."""
    held, before = (sum(int(np.prod(one.shape)) for one in each.variables) for each in (parts, whole))
    slots = len(parts.__dict__["_hvdkit_parts"].layout.slots())
    elements = sum(int(np.prod(one.shape)) for one in make_model().trainable_variables) * slots
    shared = before - elements
    assert sum(one - shared - slots for one in hvd.allgather_object(held)) == elements


def memory() -> tuple[int, int]:
    """Elements of slots on this rank, and without shard."""
    with joined():
        counts = []
        for kind in ("optimizer", None):
            model = keras.Sequential([keras.Input((100,)), *(keras.layers.Dense(100) for _ in range(5))])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01), shard=kind)
            optimizer.build(model.trainable_variables)
            counts.append(sum(int(np.prod(one.shape)) for one in optimizer.variables))
        return counts[0], counts[1]


def loops() -> None:
    """A loop of one's own, with variables that are frozen in some steps, or have no gradient."""
    with joined(**_SETTINGS):
        data = mine(make_data())
        models = []
        for kind in (None, "gradients"):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard=kind)
            variables = model.trainable_variables
            optimizer.build(variables)
            for step, row in enumerate(range(0, len(data[0]), ROWS)):
                gradients = _gradients(model, *(array[row : row + ROWS] for array in data))
                if step == 1:
                    gradients[0] = None
                trained = slice(2 if step % 3 == 0 else 4)
                optimizer.apply(gradients[trained], variables[trained])
            models.append(model)
        assert_alike(models[1], models[0], 1e-6)


def traced() -> None:
    """A tf.function of one's own, which builds the optimizer."""
    tf = importlib.import_module("tensorflow")
    wrapper = importlib.import_module("hvdkit.tensorflow")
    with joined(**_SETTINGS):
        data = mine(make_data())
        models, kept = [], []
        for kind in (None, "optimizer"):
            model = make_model()
            optimizer = wrapper.DistributedOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.1), shard=kind)
            kept.append(optimizer)

            @tf.function  # type: ignore[untyped-decorator]
            def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                return loss

            for row in range(0, len(data[0]), ROWS):
                step(*(tf.constant(array[row : row + ROWS]) for array in data))
            models.append(model)
        assert_alike(models[1], models[0], 1e-6)


def save(folder: str, name: str) -> None:
    """Train half, and save; then the whole, for load()."""
    with joined(**_SETTINGS):
        model = _compiled(name, shard="optimizer")
        _fit_part(model, 0)
        hvd.checkpoint.save(folder, model=model, epoch=1)
        with raises(RuntimeError, "gather_state() on all ranks"):
            model.optimizer.save_own_variables({})
        model.optimizer.gather_state()
        plain = _compiled(name, wrap=False)
        state: dict[str, Any] = {}
        plain.optimizer.build(plain.trainable_variables)
        model.optimizer.save_own_variables(state)
        plain.optimizer.load_own_variables(state)
        plain.set_weights(model.get_weights())
        _fit_whole(plain, 1)
        _fit_part(model, 1)
        assert_alike(model, plain)
        hvd.barrier()
        if hvd.rank() == 0:
            plain.save_weights(f"{folder}/whole.weights.h5")


def load(folder: str, name: str, shard: str | None) -> None:
    """Go on from there with so many ranks as there are."""
    with joined(**_SETTINGS):
        model = _compiled(name, shard=shard)
        assert hvd.checkpoint.load(folder, model=model, epoch=0) == {"epoch": 1}
        _fit_part(model, 1)
        reference = _compiled(name, wrap=False)
        reference.optimizer.build(reference.trainable_variables)
        reference.load_weights(f"{folder}/whole.weights.h5")
        assert_alike(model, reference)


def _compiled(name: str, *, wrap: bool = True, shard: str | None = None) -> Any:
    model, optimizer = make_model(), make_optimizer(SPECS[name])
    model.compile(hvd.DistributedOptimizer(optimizer, shard=shard) if wrap else optimizer, "mse")
    return model


_BATCHES = 12  # samples in a batch of all ranks, however many there are


def _fit_part(model: Any, part: int) -> None:
    x, y = _part(part)
    size, rank = hvd.size(), hvd.rank()
    rows = _BATCHES // size
    x, y = (array.reshape(-1, size, rows, array.shape[1])[:, rank].reshape(-1, array.shape[1]) for array in (x, y))
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)


def _fit_whole(model: Any, part: int) -> None:
    model.fit(*_part(part), batch_size=_BATCHES, shuffle=False, verbose=0)


def _part(part: int) -> tuple[Any, Any]:
    random = np.random.RandomState(part)
    return random.randn(3 * _BATCHES, 12).astype("float32"), random.randn(3 * _BATCHES, 5).astype("float32")


def refused() -> None:
    """What cannot be divided, or not with other arguments."""
    with joined():

        def wrap(optimizer: Any = None, **arguments: Any) -> Any:
            return hvd.DistributedOptimizer(optimizer or keras.optimizers.Adam(), **{"shard": "optimizer", **arguments})

        for name in ("Adafactor", "Lamb", "Muon"):
            with raises(ValueError, "treats every element by itself"):
                wrap(getattr(keras.optimizers, name)(learning_rate=0.1))
        with raises(ValueError, 'use shard="optimizer" or "gradients"'):
            wrap(shard="all")
        with raises(ValueError, "codings"):
            wrap(compression=hvd.Compression.TopK(0.1))
        with raises(ValueError, "use_ema"):
            wrap(keras.optimizers.SGD(0.1, use_ema=True))
        with raises(ValueError, "mixed_bfloat16"):
            wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        with raises(ValueError, "mixed_bfloat16"):
            keras.optimizers.LossScaleOptimizer(wrap())
        model = make_model()
        built = keras.optimizers.SGD(0.1)
        built.build(model.trainable_variables)
        with raises(ValueError, "already built"):
            wrap(built)
        sharded = wrap()
        sharded.build(model.trainable_variables)
        with raises(ValueError, "hvd.broadcast_model"):
            hvd.broadcast_variables(sharded.variables)
        model.compile(sharded, "mse")
        with raises(ValueError, "shard="):
            hvd.elastic.KerasState(model)
        with raises(ValueError, "Unknown variable"):
            other = make_model().trainable_variables
            sharded.apply([keras.ops.zeros(one.shape) for one in other], other)
