"""Bodies for ranks that train with Keras, each compared with one process that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

import hvdkit.keras as hvd
from hvdkit.errors import ReplicasDifferError

ROWS = 4  # samples of a rank in a batch
Arrays = tuple[NDArray[Any], NDArray[Any]]


@contextmanager
def joined(**settings: Any) -> Any:
    """Between init() and shutdown()."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    keras.utils.set_random_seed(1)
    hvd.init(**settings)
    yield
    hvd.shutdown()
    keras.config.set_dtype_policy("float32")


@contextmanager
def raises(kinds: Any, words: str) -> Iterator[None]:
    """As pytest.raises, which ranks do not have."""
    try:
        yield
    except kinds as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing said of {words!r}")


def make_model(**options: Any) -> Any:
    """A small model, always the same."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(20, activation="tanh", name="hidden", **options),
            keras.layers.Dense(5, name="out", dtype="float32"),
        ]
    )


def make_data(batches: int = 6, seed: int = 0) -> Arrays:
    """The whole data, so many batches of all ranks."""
    random = np.random.RandomState(seed)
    rows = batches * ROWS * hvd.size()
    return random.randn(rows, 12).astype("float32"), random.randn(rows, 5).astype("float32")


def mine(data: Arrays) -> Arrays:
    """This rank's part, so that the ranks' batches together are the batches of the whole."""
    size, rank = hvd.size(), hvd.rank()
    parts = []
    for array in data:
        batches = array.reshape(-1, size, ROWS, *array.shape[1:])
        parts.append(batches[:, rank].reshape(-1, *array.shape[1:]))
    return parts[0], parts[1]


def fit(model: Any, optimizer: Any, data: tuple[Any, ...], *, rows: int | None, epochs: int = 2, **options: Any) -> Any:
    """Train in order, without a word."""
    compiled = options.pop("compiled", {})
    model.compile(optimizer, "mse", **compiled)
    return model.fit(*data, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, **options)


def fit_alone(model: Any, optimizer: Any, data: Arrays, *, epochs: int = 2, eager: bool = True) -> None:
    """Train as one process would with the whole data; without tracing, which costs more than these few steps."""
    whole = ROWS * hvd.size()
    compiled = {"run_eagerly": eager and keras.backend.backend() == "tensorflow"}
    fit(model, optimizer, data, rows=whole, epochs=epochs, compiled=compiled)


def assert_alike(model: Any, reference: Any, tolerance: float = 1e-5) -> None:
    """This rank's weights are those of the reference, and bit for bit those of rank 0."""
    weights = [np.array(weight) for weight in model.get_weights()]
    for name, one, two in zip([w.path for w in model.weights], weights, reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance, err_msg=name)
    for other in hvd.allgather_object(weights):
        for one, two in zip(weights, other, strict=True):
            np.testing.assert_array_equal(one, two)


def make_optimizer(spec: dict[str, Any]) -> Any:
    """The optimizer that `spec` names, with its options."""
    options = dict(spec)
    return getattr(keras.optimizers, options.pop("name"))(**options)


def _compression(named: Any) -> Any:
    return getattr(hvd.Compression, named) if isinstance(named, str) else named


def train(spec: dict[str, Any], settings: dict[str, Any] | None = None, **wrap: Any) -> None:
    """Through fit: several ranks do what one process does."""
    with joined(**(settings or {})):
        compression = wrap.pop("compression", "none")
        data = make_data()
        reference, model = make_model(), make_model()
        fit_alone(reference, make_optimizer(spec), data)
        if hvd.rank() > 0:
            model.set_weights([3 * weight for weight in model.get_weights()])
        optimizer = hvd.DistributedOptimizer(make_optimizer(spec), compression=_compression(compression), **wrap)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, optimizer, mine(data), rows=ROWS, callbacks=[start])
        assert_alike(model, reference)


def every_optimizer() -> None:
    """All optimizers that Keras has."""
    with joined():
        data = make_data(batches=3)
        kinds = {
            kind
            for kind in vars(keras.optimizers).values()
            if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
        }
        kinds = {kind for kind in kinds if "Optimizer" not in kind.__name__}  # those that hold others
        assert len(kinds) > 9

        def make_small() -> Any:
            keras.utils.set_random_seed(1)
            return keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])

        for kind in sorted(kinds, key=lambda one: one.__name__):
            reference, model = make_small(), make_small()
            eager = kind.__name__ != "ScheduleFreeAdamW"  # Keras 3.15 comes to something else with it than in a graph
            fit_alone(reference, kind(learning_rate=0.01), data, epochs=1, eager=eager)
            optimizer = kind(learning_rate=0.01)
            wrapped = hvd.DistributedOptimizer(optimizer)
            assert wrapped is optimizer
            assert isinstance(wrapped, kind)
            assert wrapped.__class__.__name__ == type(wrapped).__name__ == kind.__name__
            fit(model, wrapped, mine(data), rows=ROWS, epochs=1)
            # What these do with a gradient's sign, or divide by something near 0, makes much of its last bit.
            assert_alike(model, reference, 1e-4)


def backward_passes(average: bool) -> None:
    """Horovod's name for accumulation; a sum of passes unless it is to be averaged."""
    with joined():
        data = make_data()
        rate = 0.1 if average else 0.1 * 2
        reference, model = make_model(), make_model()
        plain = keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
        fit_alone(reference, plain, data)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        fit(model, optimizer, mine(data), rows=ROWS)
        assert_alike(model, reference)


def sum_of_gradients() -> None:
    """op=Sum is the average with a learning rate that many times as high."""
    with joined():
        data = make_data()
        reference, model = make_model(), make_model()
        fit_alone(reference, keras.optimizers.SGD(0.02 * hvd.size()), data)
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.02), op=hvd.Sum), mine(data), rows=ROWS)
        assert_alike(model, reference)


def mixed_precision(wrap_outer: bool, steps: int | None = None) -> None:
    """mixed_float16: one rank's infinite gradient makes all ranks skip the step, and the loss scale stays the same."""
    with joined():
        keras.config.set_dtype_policy("mixed_float16")
        data = make_data(batches=8)
        data[1][2 * ROWS * hvd.size() + 1] = 6e4  # in the third batch, on rank 0
        reference, model = make_model(), make_model()
        if hvd.rank() == 1:  # the ranks still find each other's steps
            hvd.DistributedOptimizer(keras.optimizers.SGD())

        def make() -> Any:
            return keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=steps, clipnorm=1.0)

        fit_alone(reference, keras.optimizers.LossScaleOptimizer(make(), initial_scale=2.0**10), data)
        if wrap_outer:
            inner = keras.optimizers.LossScaleOptimizer(make(), initial_scale=2.0**10)
            optimizer = hvd.DistributedOptimizer(inner)
        else:

            class Scaled(keras.optimizers.LossScaleOptimizer):
                """Of the script's own."""

            optimizer = Scaled(inner_optimizer=hvd.DistributedOptimizer(make()), initial_scale=2.0**10)
        fit(model, optimizer, mine(data), rows=ROWS)
        scales = hvd.allgather_object(float(np.array(optimizer.dynamic_scale)))
        assert set(scales) == {float(np.array(reference.optimizer.dynamic_scale))}
        assert scales[0] < 2.0**10, "nothing overflowed"
        # float16 products of other batch shapes are rounded otherwise: 2^-11 of an update each time.
        assert_alike(model, reference, 5e-3)


def mixed_precision_by_compile() -> None:
    """compile() makes the LossScaleOptimizer by itself, around the wrapped one."""
    with joined():
        keras.config.set_dtype_policy("mixed_float16")
        data = make_data(batches=8)
        data[1][2 * ROWS * hvd.size() + 1] = 6e4
        reference, model = make_model(), make_model()
        fit_alone(reference, keras.optimizers.Adam(0.01), data)
        fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), mine(data), rows=ROWS)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert_alike(model, reference, 2e-2)


def frozen_layers() -> None:
    """A layer that is not trained, then is."""
    with joined():
        data = make_data()
        reference, model = make_model(), make_model()
        for trainable in (False, True):
            reference.get_layer("hidden").trainable = trainable
            fit_alone(reference, keras.optimizers.Adam(0.01), data, epochs=1)
            model.get_layer("hidden").trainable = trainable
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
            fit(model, optimizer, mine(data), rows=ROWS, epochs=1)
        assert_alike(model, reference)


def sparse_embedding(as_dense: bool) -> None:
    """An embedding, whose gradient TensorFlow gives as rows; ranks use different rows."""
    with joined():
        random = np.random.RandomState(0)
        rows = 6 * ROWS * hvd.size()
        data = random.randint(0, 50, (rows, 3)), random.randn(rows, 4).astype("float32")

        def make() -> Any:
            keras.utils.set_random_seed(1)
            layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(50, 8), keras.layers.Flatten()]
            return keras.Sequential([*layers, keras.layers.Dense(4)])

        # Adam leaves the rows alone that a sparse gradient does not name; a dense one names them all.
        kind = keras.optimizers.SGD if as_dense else keras.optimizers.Adam
        reference, model = make(), make()
        fit_alone(reference, kind(0.01), data)
        fit(model, hvd.DistributedOptimizer(kind(0.01), sparse_as_dense=as_dense), mine(data), rows=ROWS)
        assert_alike(model, reference)


def partial() -> None:
    """A local layer's gradients stay on their rank, divided by the number of ranks; the others are averaged."""
    with joined():
        data = make_data(batches=1)
        model, reference, alone = make_model(), make_model(), make_model()
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.get_layer("hidden"))
        fit(model, optimizer, mine(data), rows=ROWS, epochs=1)
        fit_alone(reference, keras.optimizers.SGD(0.1), data, epochs=1)
        fit(alone, keras.optimizers.SGD(0.1 / hvd.size()), mine(data), rows=ROWS, epochs=1)
        for name, expected in (("hidden", alone), ("out", reference)):
            for one, two in zip(
                model.get_layer(name).get_weights(), expected.get_layer(name).get_weights(), strict=True
            ):
                np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def process_set() -> None:
    """Ranks of a set train together, the others by themselves."""
    with joined():
        some = hvd.add_process_set([0, hvd.size() - 1])
        ranks: Any = [0]
        for call, value in ((hvd.DistributedOptimizer, keras.optimizers.SGD(0.1)), (hvd.allreduce, np.ones(1))):
            with pytest.raises(TypeError, match=r"process_set is \[0\], but it must be an hvd.ProcessSet"):
                call(value, process_set=ranks)
        model, alone = make_model(), make_model()
        data = mine(make_data())
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=some), data, rows=ROWS)
        fit(alone, keras.optimizers.SGD(0.1), data, rows=ROWS)
        told = hvd.allgather_object([np.array(weight) for weight in model.get_weights()])
        same = [all(np.array_equal(a, b) for a, b in zip(told[0], one, strict=True)) for one in told]
        assert same == [rank in (0, hvd.size() - 1) for rank in range(hvd.size())]
        if not some.included():
            for one, two in zip(model.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_array_equal(one, two)


def _gradients(model: Any, x: Any, y: Any) -> list[Any]:
    """The gradients of the mean squared error, by the backend's own means."""
    name = keras.backend.backend()
    if name == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        return list(tape.gradient(loss, model.trainable_variables))
    if name == "torch":
        import torch

        loss = keras.ops.mean(keras.ops.square(model(x) - keras.ops.convert_to_tensor(y)))
        return list(torch.autograd.grad(loss, [variable.value for variable in model.trainable_variables]))
    import jax

    def loss_of(values: Any) -> Any:
        predicted, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], x)
        return keras.ops.mean(keras.ops.square(predicted - y))

    return list(jax.grad(loss_of)([variable.value for variable in model.trainable_variables]))


def frozen_gradients() -> None:
    """Gradients that are handed over are reduced whether or not their variables are trainable."""
    with joined():
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
        variables, before = list(model.trainable_variables), model.get_weights()
        optimizer.build(variables)
        for layers in (model.layers[:1], model.layers):
            for layer in layers:
                layer.trainable = False
            optimizer.apply([keras.ops.full(each.shape, hvd.rank() + 1.0) for each in variables], variables)
        for new, old in zip(model.get_weights(), before, strict=True):
            np.testing.assert_allclose(new - old, -2 * sum(range(1, hvd.size() + 1)), rtol=1e-5)


def other_numbers_of_gradients() -> None:
    """Around a LossScaleOptimizer too they are named by Keras's own errors; a subclass returns what it returns."""

    class Returning(keras.optimizers.SGD):
        def apply(self, *args: Any) -> str:
            super().apply(*args)
            return "applied"

    with joined():
        variables = make_model().trainable_variables
        gradients = [keras.ops.ones(each.shape) for each in variables]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(Returning(0.1)))
        with raises(ValueError, "must be built"):
            optimizer.stateless_apply([], gradients, [each.value for each in variables])
        optimizer.build(variables)
        with raises(ValueError, "gradients must match"):
            optimizer.apply(gradients[:1])
        words = "not supported" if keras.backend.backend() == "tensorflow" else "1:1"
        with raises((ValueError, NotImplementedError), words):
            optimizer.stateless_apply([each.value for each in optimizer.variables], gradients, [variables[0].value])
        assert hvd.DistributedOptimizer(Returning(0.1)).apply(gradients, variables) == "applied"


def apply_by_hand() -> None:
    """A loop of one's own that calls optimizer.apply, eagerly."""
    with joined():
        data = make_data()
        reference, model = make_model(), make_model()
        steps: list[tuple[Any, Any, Arrays, int]] = [
            (reference, keras.optimizers.Adam(0.01), data, ROWS * hvd.size()),
            (model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), mine(data), ROWS),
        ]
        for one, optimizer, (x, y), rows in steps:
            for at in range(0, len(x), rows):
                gradients = _gradients(one, x[at : at + rows], y[at : at + rows])
                optimizer.apply(gradients, one.trainable_variables)
        assert_alike(model, reference)


def two_optimizers() -> None:
    """Two models that are trained in turns, each with its own optimizer, by a train_step of one's own."""
    with joined():
        data = make_data()
        whole = [make_model(), make_model()]
        part = [make_model(), make_model()]

        def wrap(optimizer: Any) -> Any:
            return hvd.DistributedOptimizer(optimizer)

        def plain(optimizer: Any) -> Any:
            return optimizer

        cases: list[tuple[list[Any], Callable[[Any], Any], Arrays, int]] = [
            (whole, plain, data, ROWS * hvd.size()),
            (part, wrap, mine(data), ROWS),
        ]
        for models, make, (x, y), rows in cases:
            optimizers = [make(keras.optimizers.Adam(0.01)), make(keras.optimizers.SGD(0.1))]
            for at in range(0, len(x), rows):
                for model, optimizer in zip(models, optimizers, strict=True):
                    gradients = _gradients(model, x[at : at + rows], y[at : at + rows])
                    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for one, two in zip(part, whole, strict=True):
            assert_alike(one, two)


def different_models() -> None:
    """Ranks with different models are told so, with both sides."""
    with joined():
        keras.utils.set_random_seed(1)
        width = 7 if hvd.rank() else 6
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(width), keras.layers.Dense(5)])
        seen = ""
        try:
            fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), mine(make_data()), rows=ROWS)
        except Exception as error:
            seen = str(error)
        assert "do not hold the same parameters" in seen, seen
        assert "dense/kernel" in seen, seen


class _Plants(keras.callbacks.Callback):
    """Changes one number of one rank after the fourth step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras's own."""
        if batch == 3 and hvd.rank() == 1:
            bias = self.model.get_layer("out").bias
            bias.assign(keras.ops.convert_to_numpy(bias) + np.float32(1e-3))


def drift() -> str:
    """What is said of a rank whose variables are changed, by the second check after."""
    with joined(check_replicas=3):
        x, y = mine(make_data())
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), _Plants()]
        try:
            model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        except ReplicasDifferError as error:
            return str(error)
    return "nothing"


def in_a_part(spec: dict[str, Any]) -> None:
    """The job's ranks 2 and 0, in this order, train; rank 1 calls nothing of hvdkit."""
    from mpi4py import MPI

    job = MPI.COMM_WORLD
    comm = job.Split(job.rank == 1, -job.rank)
    if job.rank != 1:
        train(spec, {"comm": comm})
        with joined(comm=[2, 0]):
            assert (hvd.rank(), hvd.size(), hvd.local_size()) == (int(job.rank == 0), 2, 2)
