"""Bodies for ranks that divide their gradients: those are sent and freed while backward computes the others."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import keras
import numpy as np
from keras_training import ROWS, joined, raises

import hvdkit.keras as hvd
from hvdkit.engine.array_sync import ArraySync
from hvdkit.engine.sharding.arrays import ShardedArrays

_LAYERS, _WIDTH = 16, 64
_BYTES = 4 * _WIDTH * (_WIDTH + 1)  # of a layer's gradients


def _deep(layer: Any = keras.layers.Dense) -> Any:
    layers = [layer(_WIDTH, name=f"layer_{number}") for number in range(_LAYERS)]
    return keras.Sequential([keras.Input((_WIDTH,)), *layers])


def on_jax() -> tuple[int, int, int]:
    """The bytes of XLA's memory of a step with each kind of shard, and those of the gradients."""
    jax = importlib.import_module("jax")
    with joined(fusion_bytes=_BYTES, buckets_in_flight=1):
        needed = []
        for shard in ("optimizer", "gradients"):
            model = _deep()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), shard=shard)
            optimizer.build(model.trainable_variables)

            def step(values: Any, state: Any, x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                def loss(values: Any) -> Any:
                    return keras.ops.mean(model.stateless_call(values, [], x)[0] ** 2)

                return optimizer.stateless_apply(state, jax.grad(loss)(values), values)

            values = [variable.value for variable in model.trainable_variables]
            state = [variable.value for variable in optimizer.variables]
            compiled = (
                jax.jit(step, donate_argnums=(0, 1)).lower(values, state, np.ones((2, _WIDTH), "float32")).compile()
            )
            needed.append(compiled.memory_analysis().temp_size_in_bytes)
        return needed[0], needed[1], _LAYERS * _BYTES


def on_tensorflow(shard: str) -> int:
    """So many layers' gradients exist together, at most."""
    tf = importlib.import_module("tensorflow")
    there: set[int] = set()
    most = [0]

    def computed(number: int, gradient: Any) -> Any:
        there.add(number)
        most[0] = max(most[0], len(there))
        return gradient

    class Watched(keras.layers.Dense):  # type: ignore[misc]
        """Says when the gradient of its kernel is there; in no order with other operations."""

        def call(self, inputs: Any) -> Any:
            number = int(self.name.rpartition("_")[2])

            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def watch(kernel: Any) -> Any:
                def back(gradient: Any) -> Any:
                    seen = tf.numpy_function(
                        lambda array: computed(number, array), [gradient], tf.float32, stateful=False
                    )
                    return tf.ensure_shape(seen, gradient.shape)

                return tf.identity(kernel), back

            return inputs @ watch(self.kernel) + self.bias

    arrived = ShardedArrays.arrived

    def note(arrays: ShardedArrays, tensor: int, gradient: Any) -> None:
        arrived(arrays, tensor, gradient)
        if tensor % 2 == 0:  # a kernel
            there.discard(tensor // 2)

    with joined(fusion_bytes=_BYTES, buckets_in_flight=1):
        ShardedArrays.arrived = note  # type: ignore
        try:
            model = _deep(Watched)
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), shard=shard), "mse", jit_compile=False)
            x = np.ones((2 * ROWS, _WIDTH), "float32")
            model.fit(x, x, batch_size=ROWS, verbose=0)
        finally:
            ShardedArrays.arrived = arrived  # type: ignore
    return most[0]


def values_on_tensorflow(wrap: str) -> int:
    """So many arrays of the first variable's values exist while a step sends its gradients, at most."""
    arrays: list[Any] = []
    most = [0]
    of, put = (ShardedArrays, "gather") if wrap == "shard" else (ArraySync, "after_step")
    before: dict[str, Any] = {name: getattr(of, name) for name in ("arrived", put)}

    def note(driver: Any, tensor: int, gradient: Any) -> None:
        before["arrived"](driver, tensor, gradient)
        if tensor == 0:
            most[0] = max(most[0], len({id(one()) for one in arrays if one() is not None}))

    def new_values(driver: Any, values: Any, targets: Any) -> None:
        before[put](driver, values, targets)
        array = targets[0]
        while isinstance(array.base, np.ndarray):
            array = array.base
        arrays.append(weakref.ref(array))

    with joined():
        for name, function in {"arrived": note, put: new_values}.items():
            setattr(of, name, function)
        try:
            model, plain = _deep(), keras.optimizers.SGD(0.1)
            optimizer = (
                hvd.DistributedOptimizer(plain, shard="optimizer")
                if wrap == "shard"
                else hvd.LocalSGD(plain, model=model, every=2, start_after=1)
            )
            model.compile(optimizer, "mse")
            x = np.ones((6 * ROWS, _WIDTH), "float32")
            model.fit(x, x, batch_size=ROWS, verbose=0)
        finally:
            for name, function in before.items():
                setattr(of, name, function)
    assert arrays
    return most[0]


def on_torch(shard: str) -> int:
    """So many tensors' gradients exist together, at most: those of parameters, and those that were handed over."""
    held: dict[int, Any] = {}
    most = [0]
    arrived = ShardedArrays.arrived

    def note(arrays: ShardedArrays, tensor: int, gradient: Any) -> None:
        held[tensor] = weakref.ref(gradient)
        arrived(arrays, tensor, gradient)
        of_parameters = {
            index for index, variable in enumerate(model.trainable_variables) if variable.value.grad is not None
        }
        handed_over = {index for index, one in held.items() if one() is not None and one() is not gradient}
        most[0] = max(most[0], len(of_parameters | handed_over))

    with joined(fusion_bytes=_BYTES, buckets_in_flight=1):
        ShardedArrays.arrived = note  # type: ignore
        try:
            model = _deep()
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), shard=shard), "mse")
            x = np.ones((2 * ROWS, _WIDTH), "float32")
            model.fit(x, x, batch_size=ROWS, verbose=0)
        finally:
            ShardedArrays.arrived = arrived  # type: ignore
    return most[0]


def particular_on_torch() -> None:
    """A rank without a piece, a layer that is frozen, and two backward passes of different layers: as without shard."""
    torch = importlib.import_module("torch")
    with joined():
        models: list[list[Any]] = []
        for shard in (None, "gradients"):
            keras.utils.set_random_seed(1)
            x = np.full((2 * ROWS, 4), hvd.rank() + 1.0, "float32")
            inputs = keras.Input((4,))
            tiny = keras.Model(inputs, keras.layers.Dense(1, use_bias=False)(inputs[:, :1]))
            layers = keras.layers.Dense(4), keras.layers.Dense(4)
            frozen = keras.Sequential([keras.Input((4,)), *layers])
            for model, trainable in ((tiny, True), (frozen, False)):
                model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), shard=shard), "mse")
                model.fit(x, x[:, : model.output_shape[-1]], batch_size=ROWS, verbose=0)
                layers[1].trainable = trainable
                model.fit(x, x[:, : model.output_shape[-1]], batch_size=ROWS, verbose=0)
            layers[1].trainable = True
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), shard=shard)
            variables = frozen.trainable_variables
            optimizer.build(variables)
            frozen.zero_grad()
            for layer in layers:
                optimizer.scale_loss((layer(torch.from_numpy(x)) ** 2).mean()).backward()
            with torch.no_grad():
                optimizer.apply([one.value.grad for one in variables], variables)
            models.append([one.numpy() for one in [*tiny.variables, *frozen.variables]])
        for whole, divided in zip(*models, strict=True):
            np.testing.assert_allclose(divided, whole, rtol=1e-6, atol=1e-7)


def misused_on_torch(misuse: str) -> None:
    """A second backward, a gradient that was changed before apply(), and variables that it does not get, are errors."""
    torch = importlib.import_module("torch")
    with joined():
        model = _deep()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), shard="gradients")
        optimizer.build(model.trainable_variables)
        loss = optimizer.scale_loss((model(torch.ones(3, _WIDTH)) ** 2).mean())
        loss.backward(retain_graph=True)
        variables = model.trainable_variables
        if misuse == "change":
            with raises(ValueError, "was sent during backward()"):
                optimizer.apply([torch.zeros_like(one.value) for one in variables], variables)
        elif misuse == "some":
            with raises(ValueError, "Pass all variables that backward trains"):
                optimizer.apply([None], variables[:1])
        else:
            with raises(RuntimeError, "call backward() once before apply()"):
                loss.backward()
