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
    "Momentum": {"name": "Momentum", "learning_rate": 0.05},
    "averages": {"name": "Adam", "learning_rate": 0.01, "use_ema": True, "ema_momentum": 0.8},
    "overwritten": {
        "name": "SGD",
        "learning_rate": 0.05,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 1,
        "gradient_accumulation_steps": 2,
    },
    "accumulation": {"name": "AdamW", "learning_rate": 0.01, "gradient_accumulation_steps": 2, "global_clipnorm": 0.05},
}
#: Several buckets, whose shards cut variables.
_SETTINGS: dict[str, Any] = {"fusion_bytes": 600, "check_replicas": 2}


def train(specs: list[str], shard: str = "optimizer") -> None:
    """Ranks come to the variables of the same ranks without shard, and to those of one process."""
    with joined(**_SETTINGS):
        for name in specs:
            _train(SPECS[name], shard, alone=name == specs[0])


def _train(spec: dict[str, Any], shard: str, *, alone: bool) -> None:
    data = make_data(batches=4)
    models = []
    for kind in (None, shard):
        model, optimizer = _make_model(), _make(spec)
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
        reference = _make_model()
        fit_alone(reference, _make(spec), data)
        assert_alike(parts, reference)


class _Factor(keras.layers.Layer):
    """A layer of one number, a variable without dimensions."""

    def build(self, _: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor


def _make_model() -> Any:
    model = make_model(kernel_constraint="max_norm")
    model.add(_Factor())
    return model


def _make(spec: dict[str, Any]) -> Any:
    optimizer = Momentum(spec["learning_rate"]) if spec["name"] == "Momentum" else make_optimizer(spec)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _assert_divided(parts: Any, whole: Any) -> None:
    """The ranks hold together what one did, and each one element more for each slot."""
    held, before = (sum(int(np.prod(one.shape)) for one in each.variables) for each in (parts, whole))
    slots = len(parts.__dict__["_hvdkit_parts"].layout.slots())
    elements = sum(int(np.prod(one.shape)) for one in _make_model().trainable_variables) * slots
    shared = before - elements
    assert sum(one - shared - slots for one in hvd.allgather_object(held)) == elements


def loss_scale(wrap_outer: bool, steps: int | None = None) -> None:
    """One rank's infinite gradient, which other ranks have pieces of, makes all skip the step."""
    with joined(**_SETTINGS):
        keras.config.set_dtype_policy("mixed_float16")
        data = make_data(batches=8)
        data[1][2 * ROWS * hvd.size() + 1] = 6e4  # in the third batch, on rank 0
        models, scales = [], []
        for kind in (None, "gradients"):
            inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=steps, clipnorm=1.0)
            if wrap_outer:
                scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)
                optimizer = hvd.DistributedOptimizer(scaled, shard=kind)
            else:
                wrapped = hvd.DistributedOptimizer(inner, shard=kind)
                optimizer = keras.optimizers.LossScaleOptimizer(wrapped, initial_scale=2.0**10)
            model = make_model()
            fit(model, optimizer, mine(data), rows=ROWS)
            models.append(model)
            scales += hvd.allgather_object((float(np.array(optimizer.dynamic_scale)), int(optimizer.iterations)))
        assert len(set(scales)) == 1 and scales[0][0] < 2.0**10, scales
        assert_alike(models[1], models[0], 1e-6)
        _save_and_load(models[1])


def _save_and_load(model: Any) -> None:
    """A LossScaleOptimizer's whole state, with the one of the optimizer in it."""
    model.optimizer.gather_state()
    state: dict[str, Any] = {}
    model.optimizer.save_own_variables(state)
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
    plain.build(make_model().trainable_variables)
    if len(plain.variables) == len(state):  # else there was no accumulation
        plain.load_own_variables(state)
    before = [np.array(variable) for variable in model.optimizer.variables]
    model.optimizer.load_own_variables(state)
    for one, two in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(one), two)


def divided_anew(name: str) -> None:
    """Ranks whose state is divided otherwise go on from the commit as one process does that nothing happens to."""
    with joined(**_SETTINGS):
        model = _compiled(name, shard="optimizer")
        state = hvd.elastic.KerasState(model, part=0)
        state.sync()
        _fit_part(model, 0)
        state.part = 1
        state.commit()
        _fit_part(model, 2)
        state.restore()
        pieces = model.optimizer.__dict__["_hvdkit_parts"].ranges
        hvd.shutdown()
        hvd.init(**{**_SETTINGS, "fusion_bytes": 1000})
        with raises(Exception, "before shutdown()"):
            model.optimizer.gather_state()
        state.on_reset()
        state.sync()
        assert model.optimizer.__dict__["_hvdkit_parts"].ranges != pieces and state.part == 1
        _fit_part(model, 1)
        reference = _compiled(name, wrap=False)
        for part in (0, 1):
            _fit_whole(reference, part)
        assert_alike(model, reference, 1e-6)
        assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
        model.optimizer.gather_state()  # what it keeps is of before the steps that follow
        _fit_part(model, 2)
        before = [np.array(variable) for variable in model.optimizer.variables]
        hvd.broadcast_model(model)
        for one, two in zip(model.optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(one), two)
        hvd.shutdown()
        hvd.init(**_SETTINGS)
        with raises(ValueError, "Call state.commit()"):
            state.sync()


def large(shard: str) -> None:
    """Pieces that are summed and sent where they lie, in several buckets."""
    with joined(check_replicas=1, fusion_bytes=100_000, buckets_in_flight=2):
        models = []
        for kind in (None, shard):
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Dense(300, activation="tanh") for _ in range(2)]
            model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5)])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001), shard=kind)
            fit(model, optimizer, mine(make_data()), rows=ROWS)
            models.append(model)
        assert_alike(models[1], models[0], 1e-6)


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
    with joined(fusion_bytes=100, buckets_in_flight=1):
        data = mine(make_data())
        models, kept = [], []
        for kind in (None, "gradients"):
            model = make_model()
            optimizer = wrapper.DistributedOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.1), shard=kind)
            kept.append(optimizer)

            @tf.function  # type: ignore[untyped-decorator]
            def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                with tf.control_dependencies([tf.group(*gradients)]):
                    gradients = [tf.identity(gradient) for gradient in gradients]
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


class Momentum(keras.optimizers.Optimizer):
    """An optimizer of one's own, which treats every element by itself."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.speeds = self.add_optimizer_variables(variables, "speed")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        speed = self.speeds[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign(speed, 0.9 * speed + gradient)
        self.assign_sub(variable, rate * speed)


class _WithAHistory(Momentum):
    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.history = self.add_variable((10,), name="history")


def refused() -> None:
    """What cannot be divided, or not with other arguments."""
    with joined():

        def wrap(optimizer: Any = None, **arguments: Any) -> Any:
            return hvd.DistributedOptimizer(optimizer or keras.optimizers.Adam(), **{"shard": "optimizer", **arguments})

        for name in ("Adafactor", "Lamb", "Muon"):
            with raises(ValueError, "treats every element by itself"):
                wrap(getattr(keras.optimizers, name)(learning_rate=0.1))
        wrap(Momentum(0.1, gradient_accumulation_steps=5))
        with raises(ValueError, "cannot divide"):
            wrap(_WithAHistory(0.1)).build(make_model().trainable_variables)
        with raises(ValueError, 'use shard="optimizer" or "gradients"'):
            wrap(shard="all")
        with raises(ValueError, "codings"):
            wrap(compression=hvd.Compression.TopK(0.1))
        model = make_model()
        built = keras.optimizers.SGD(0.1)
        built.build(model.trainable_variables)
        with raises(ValueError, "already built"):
            wrap(built)
        sharded = wrap()
        sharded.build(model.trainable_variables)
        with raises(ValueError, "hvd.broadcast_model"):
            hvd.broadcast_variables(sharded.variables)
        averaged = make_model()
        averaged.compile(wrap(keras.optimizers.SGD(0.1, use_ema=True)), "mse")
        averaged.optimizer.build(averaged.trainable_variables)

        class Swaps(keras.callbacks.SwapEMAWeights):
            """Of the script's own."""

        for kind in (keras.callbacks.SwapEMAWeights, Swaps):
            with raises(ValueError, "finalize_variable_values"):
                averaged.evaluate(*mine(make_data()), verbose=0, callbacks=[kind()])
        with raises(ValueError, "not the 4 of which"):
            averaged.optimizer.finalize_variable_values(averaged.trainable_variables[:2])
        with raises(ValueError, "process set"):
            some = hvd.add_process_set([0, 1])
            hvd.elastic.KerasState(model, wrap(process_set=some))
        with raises(ValueError, "Unknown variable"):
            other = make_model().trainable_variables
            sharded.apply([keras.ops.zeros(one.shape) for one in other], other)


def converted() -> None:
    """On PyTorch a model may be converted as any module: its variables are refused by name then."""
    forms: tuple[dict[str, Any], ...] = ({}, {"shard": "optimizer"}, {"shard": "gradients"})
    for arguments in forms:
        with joined():
            model = make_model()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **arguments)
            optimizer.build(model.trainable_variables)
            _apply(optimizer, model)
            before = model.get_weights()
            model.double()
            with raises(ValueError, "had the dtype torch.float32"):
                _apply(optimizer, model)
            model.float()
            _apply(optimizer, model)
            for new, old in zip(model.get_weights(), before, strict=True):
                np.testing.assert_allclose(new - old, -0.19, rtol=1e-4)
            kernel = model.trainable_variables[0].value
            kernel.data = kernel.data.t().contiguous().t()
            if arguments:
                with raises(ValueError, "has the strides (1, 12) for the shape (12, 20)"):
                    _apply(optimizer, model)
            else:
                _apply(optimizer, model)


def _apply(optimizer: Any, model: Any) -> None:
    variables = model.trainable_variables
    dtype = str(variables[0].value.dtype).removeprefix("torch.")
    optimizer.apply([keras.ops.ones(one.shape, dtype) for one in variables], variables)


def damaged() -> None:
    """A saved state that does not fit is refused by name on all ranks, before anything of it is taken."""
    with joined(**_SETTINGS):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard="optimizer")
        fit(model, optimizer, mine(make_data(batches=2)), rows=ROWS)
        optimizer.gather_state()
        state: dict[str, Any] = {}
        optimizer.save_own_variables(state)
        before = [np.array(variable) for variable in optimizer.variables]
        last = str(len(state) - 1)
        path = optimizer._hvdkit_parts_of().variables[-1].path
        for change, message in (
            ({last: np.zeros(1)}, f"Variable {last} of the saved optimizer, of {path}, has the shape (1,) in place of"),
            ({last: np.array("x")}, f"of {path}, has the dtype <U1 in place of numbers"),
            ({last: None, "x": np.zeros(1)}, f"of {path}, is missing: its keys are 0, 1,"),
        ):
            changed = {"0": np.array(77), **{key: value for key, value in state.items() if key != "0"}, **change}
            with raises(ValueError, message):
                optimizer.load_own_variables({key: value for key, value in changed.items() if value is not None})
        for variable, value in zip(optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(variable), value)
        optimizer.load_own_variables(state)
