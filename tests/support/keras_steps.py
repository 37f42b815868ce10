"""Bodies for ranks: training steps that the user writes, and what becomes of them in a compiler."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras_training import ROWS, assert_alike, fit, joined, make_data, make_model, mine, raises, train

import hvdkit.keras as hvd


class Own(keras.Model):
    """A model with a train_step of its own: on TensorFlow and PyTorch each layer has its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.hidden = keras.layers.Dense(20, activation="tanh")
        self.out = keras.layers.Dense(5)
        self.build((None, 12))

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.out.build((None, 20))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def use(self, *optimizers: Any) -> None:
        """Train with these from now on: one for each layer, or on JAX the first for both."""
        if keras.backend.backend() == "jax":
            self.compile(optimizers[0], "mse")
            return
        self.compile(loss="mse")
        self.steps = list(zip(optimizers, (self.hidden, self.out), strict=True))
        for optimizer, layer in self.steps:
            optimizer.build(layer.trainable_variables)

    def train_step(self, *given: Any) -> Any:
        return getattr(self, f"_{keras.backend.backend()}_step")(*given)

    def _apply(self, gradients: list[Any]) -> None:
        for optimizer, layer in self.steps:
            count = len(layer.trainable_variables)
            optimizer.apply(gradients[:count], layer.trainable_variables)
            gradients = gradients[count:]

    def _tensorflow_step(self, data: Any) -> Any:
        with importlib.import_module("tensorflow").GradientTape() as tape:
            loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0]))
        self._apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}

    def _torch_step(self, data: Any) -> Any:
        self.zero_grad()
        loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0]))
        loss.backward()
        with importlib.import_module("torch").no_grad():
            self._apply([variable.value.grad for variable in self.trainable_variables])
        return {"loss": loss.detach()}

    def _jax_step(self, state: Any, data: Any) -> Any:
        trained, others, optimizer, metrics = state

        def loss_of(values: Any) -> Any:
            predicted, _ = self.stateless_call(values, others, data[0])
            return keras.ops.mean(keras.ops.square(predicted - data[1]))

        loss, gradients = importlib.import_module("jax").value_and_grad(loss_of)(trained)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
        return {"loss": loss}, (trained, others, optimizer, metrics)


def own_train_step() -> None:
    """fit() with a train_step that the user wrote, and two optimizers in it, does what one process does."""
    with joined():
        data = make_data()
        reference, model = Own(), Own()
        reference.use(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
        reference.fit(*data, batch_size=ROWS * hvd.size(), epochs=2, shuffle=False, verbose=0)
        model.use(*map(hvd.DistributedOptimizer, (keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))))
        model.fit(*mine(data), batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
        assert_alike(model, reference)


def traced_once() -> None:
    """A step is traced as often as without hvdkit, whatever comes later in the training."""
    with joined():
        counts = []
        for wrap in (lambda optimizer: optimizer, hvd.DistributedOptimizer):
            calls: list[int] = []

            def loss(truth: Any, predicted: Any, calls: list[int] = calls) -> Any:
                calls.append(1)
                return keras.ops.mean(keras.ops.square(truth - predicted))

            model, part = make_model(), mine(make_data())
            model.compile(wrap(keras.optimizers.Adam(0.01)), loss)
            start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            rates = hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2)
            options: dict[str, Any] = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
            model.fit(*part, epochs=2, validation_data=part, callbacks=[start, rates], **options)
            model.fit(*part, epochs=1, **options)
            counts.append(len(calls))
        assert counts[0] == counts[1], counts


def jax_by_callback() -> None:
    """Where XLA's memory cannot be had, on a GPU or with an older JAX, gradients are copied."""
    made: Any = importlib.import_module("hvdkit.keras.jax_in_place")
    found = made.buffer_callback
    assert made.works()
    made.buffer_callback = None
    try:
        train({"name": "Adam", "learning_rate": 0.01, "global_clipnorm": 0.05})
    finally:
        made.buffer_callback = found


def two_lists_on_jax() -> None:
    """Calls of one program follow each other as they stand there, with the numbers of each; errors name their cause."""
    with joined():
        jax = importlib.import_module("jax")
        made = importlib.import_module("hvdkit.keras.jax_in_place")
        order = []

        def times(factor: int) -> Any:
            def work(arrays: list[Any], results: list[Any]) -> None:
                order.append(factor)
                for array, result in zip(arrays, results, strict=True):
                    result[...] = array * factor

            return made.InPlace(work)

        def fails(arrays: list[Any], results: list[Any]) -> None:
            raise ValueError("said by the function")

        two, three, bad = times(2), times(3), made.InPlace(fails)

        def program(x: Any, y: Any) -> Any:
            (a, b), done = two.trace([x, y], keras.ops.zeros((), "int32"))
            (c,), _ = three.trace([y], done)
            return a, b, c, y

        x, y = keras.ops.ones((2, 0, 3)), keras.ops.ones((4,), "bfloat16")
        compiled = jax.jit(program)
        for run in (compiled, compiled, program):
            a, b, c, kept = run(x, y)
            assert (a.shape, float(b.sum()), float(c.sum()), float(kept.sum())) == ((2, 0, 3), 8.0, 12.0, 4.0)
        assert order == [2, 3] * 3
        with raises(Exception, "ValueError: said by the function"):
            jax.block_until_ready(jax.jit(lambda one: bad.trace([one], keras.ops.zeros((), "int32")))(y))
        held = [times(5)]
        orphan = jax.jit(lambda one: held[0].trace([one], keras.ops.zeros((), "int32"))[0][0])
        assert float(orphan(y).sum()) == 20.0
        held.clear()
        with raises(Exception, "no longer exists"):
            jax.block_until_ready(orphan(y))


def jax_works_in_xlas_memory() -> None:
    """What a compiled program gives to the reduction it takes back in the same memory."""
    with joined():
        jax = importlib.import_module("jax")
        made = importlib.import_module("hvdkit.keras.jax_in_place")
        seen = []

        def work(arrays: list[Any], results: list[Any]) -> None:
            pairs = zip(arrays, results, strict=True)
            seen.append([one.__array_interface__["data"] == two.__array_interface__["data"] for one, two in pairs])

        call = made.InPlace(work)

        def program(*arrays: Any) -> Any:
            return call.trace([one * 2 for one in arrays], keras.ops.zeros((), "int32"))[0]

        results = jax.jit(program)(keras.ops.ones((3, 50)), keras.ops.ones((7,), "bfloat16"), keras.ops.ones(()))
        assert [float(keras.ops.sum(one)) for one in results] == [300.0, 14.0, 2.0] and seen == [[True] * 3]


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


#: Options of DistributedOptimizer, with those of the optimizer that does the same in one process.
_COMPILED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, {"gradient_accumulation_steps": 2}),
    ({"shard": "gradients"}, {}),
]


def jit_compile(way: int = 0) -> None:
    """Where the step is to be compiled: JAX and PyTorch do; on TensorFlow an error or the callback says what to do."""
    backend, (wrap, alone) = keras.backend.backend(), _COMPILED[way]
    with joined():
        data = make_data()
        heard = _Heard()
        logging.getLogger("hvdkit").addHandler(heard)
        reference, model = make_model(), make_model()
        fit(reference, keras.optimizers.SGD(0.05, **alone), data, rows=ROWS * hvd.size())
        if backend == "tensorflow":
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **wrap)
            with raises(Exception, "model.compile(jit_compile=False)"):
                fit(make_model(), optimizer, mine(data), rows=ROWS, compiled={"jit_compile": True})
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **wrap)
        with _traced_only() as graphs:
            fit(model, optimizer, mine(data), rows=ROWS, compiled={"jit_compile": True}, callbacks=[start])
        logging.getLogger("hvdkit").removeHandler(heard)
        assert graphs or backend != "torch", "nothing was compiled"
        lines = [line for line in heard.lines if "jit_compile" in line]
        assert len(lines) == int(backend == "tensorflow" and hvd.rank() == 0), lines
        assert_alike(model, reference)


@contextmanager
def _traced_only() -> Iterator[list[Any]]:
    """Within, torch.compile traces functions into graphs, which are collected, and runs these as they are.

    Compiling them for the processor would take minutes.
    """
    graphs: list[Any] = []
    if keras.backend.backend() != "torch":
        yield graphs
        return
    torch: Any = importlib.import_module("torch")
    compiler = torch.compile

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile = functools.partial(compiler, backend=keep)
    try:
        yield graphs
    finally:
        torch.compile = compiler


def gradients_of_another_kind(shard: str | None) -> None:
    """A gradient is taken in the dtype of its variable in each step; one of another shape is an error that names it."""
    with joined():
        variable = keras.Variable(np.zeros((2, 3)), dtype="float32", name="weights")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), shard=shard)
        optimizer.build([variable])
        for steps, dtype in enumerate(("float32", "float16", "bfloat16"), 1):
            given = "float16" if hvd.rank() else dtype
            optimizer.apply([keras.ops.full((2, 3), hvd.rank() + 1.0, given)], [variable])
            expected = np.full((2, 3), -steps * (hvd.size() + 1) / 2)
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), expected)
        with raises(ValueError, "weights has shape (3, 2), but the variable has (2, 3)"):
            optimizer.apply([keras.ops.ones((3, 2))], [variable])


def other_names() -> None:
    """Horovod's other name for the same module; all frameworks in one process, in one world."""
    if sys.modules.get("tensorflow", sys) is None:  # see without_tensorflow.py
        del sys.modules["tensorflow"]
    with joined():
        tensorflow = importlib.import_module("hvdkit.tensorflow")
        torch = importlib.import_module("hvdkit.torch")
        other = importlib.import_module("hvdkit.tensorflow.keras")
        assert other.DistributedOptimizer is hvd.DistributedOptimizer
        assert other.callbacks.MetricAverageCallback is hvd.callbacks.MetricAverageCallback
        assert tensorflow.size() == torch.size() == hvd.size() > 1
        ones = importlib.import_module("torch").ones(3)
        assert torch.allreduce(ones, op=torch.Sum).tolist() == [hvd.size()] * 3
        assert [float(one) for one in tensorflow.allreduce([1.0], op=tensorflow.Sum)] == [hvd.size()]
