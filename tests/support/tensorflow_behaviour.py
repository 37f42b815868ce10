"""Bodies for ranks: what the tape, the layers and the state do, and say, where training is not plain."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from docstrings import docstring_faults, functions_of
from keras_training import ROWS, assert_alike, make_data, make_model, mine
from tensorflow_training import batches, squared, train
from tensorflow_world import in_mode, joined

import hvdkit.tensorflow as hvd
from hvdkit.common import util
from hvdkit.tensorflow import result_memory
from hvdkit.tensorflow.array_gradients import ArrayGradients
from hvdkit.tensorflow.tape import _syncs


def memory_of_results() -> None:
    """Memory is used again where nobody holds it, and only on a Python whose reference counts say so."""
    with pytest.MonkeyPatch.context() as patched:
        assert result_memory.counts_are_exact() and result_memory._REUSES
        for reuses in (True, False):
            patched.setattr(result_memory, "_REUSES", reuses)
            memory = result_memory.ResultMemory([(3,)], ["float32"])
            first = memory.take(0).ctypes.data
            memory.begin()
            assert (memory.take(0).ctypes.data == first) == reuses
            held = memory.take(0)
            memory.begin()
            assert memory.take(0) is not held
        count = sys.getrefcount
        for wrong in (lambda one: 2, lambda one: count(one) - 2):  # a reference is not counted, or none are
            patched.setattr(sys, "getrefcount", wrong)
            assert not result_memory.counts_are_exact()
        patched.setattr(sys, "getrefcount", count)
        patched.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert not result_memory.counts_are_exact()


def missing_gradients(mode: str) -> None:
    """What some rank has is averaged over all of them; what no rank has stays None."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        names = ("all", "first", "none", "last", "rows")
        variables = [tf.Variable(tf.ones([4, 2]), name=name) for name in names]

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0])
                if rank == 0:
                    loss += tf.reduce_sum(variables[1])
                if rank == size - 1:
                    loss += tf.reduce_sum(variables[3]) + tf.reduce_sum(tf.gather(variables[4], [2]))
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        function = in_mode(mode, step)
        for _ in range(3):
            found = function()
            assert found[2] is None
            for at, mean in ((0, 1.0), (1, 1 / size), (3, 1 / size)):
                np.testing.assert_array_equal(found[at], np.full((4, 2), mean, np.float32))
            rows = tf.convert_to_tensor(tf.IndexedSlices(found[4].values, found[4].indices, [4, 2]))
            np.testing.assert_array_equal(rows, np.array([[0, 0], [0, 0], [1 / size] * 2, [0, 0]], np.float32))


def another_gradient_later() -> None:
    """A graph that was traced without a gradient which others begin to have says so, and names it."""
    with joined():
        used, late = tf.Variable([1.0], name="used"), tf.Variable([1.0], name="late")

        def step(with_late: bool) -> Any:
            with tf.GradientTape() as tape:
                loss = used * late if with_late else used * 2
            return hvd.DistributedGradientTape(tape).gradient(loss, [used, late])

        tf.function(step)(False)
        mine = tf.function(step)
        if hvd.rank() == 0:
            mine(True)
        else:
            _fails(lambda: mine(False), "gradients of late", "UnconnectedGradients.ZERO")
        eagerly = step(hvd.rank() == 0)
        np.testing.assert_allclose(eagerly[1], [1 / hvd.size()])


def _fails(function: Callable[[], Any], *words: str) -> None:
    try:
        function()
    except Exception as error:
        for word in words:
            assert word in str(error), str(error)
        return
    raise AssertionError(f"no error says {words}")


def different_models(mode: str) -> None:
    """Ranks with different variables are told so, with both sides."""
    with joined():
        width = 7 if hvd.rank() else 6
        weights = tf.Variable(tf.ones([3, width]), name="dense/kernel")

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights)
            return hvd.DistributedGradientTape(tape).gradient(loss, [weights])

        _fails(in_mode(mode, step), "do not hold the same parameters", "dense/kernel", "18", "21")


def joined_too_early(mode: str) -> None:
    """The first step of a model, before which some rank has joined, is an error that says so."""
    with joined():
        variable = tf.Variable([1.0], name="weights")

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = variable * 2
            return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

        if hvd.rank() > 0:
            _fails(in_mode(mode, step), "rank 0", "joined")
        else:
            _fails(in_mode(mode, hvd.join), "join() waits for it")  # the others leave


def left_early(ending: str) -> None:
    """A rank that breaks out of the loop of a graph before the others is named by their error, whatever it does next.

    ending: "shutdown", or "allreduce" for an operation that the other ranks do not request.
    """
    times: dict[str, Any] = {} if ending == "shutdown" else {"stall_check_s": 1.0, "stall_shutdown_s": 2.0}
    with joined(**times):
        weights = tf.Variable([1.0], name="weights")
        data = tf.data.Dataset.from_tensor_slices(tf.ones((6, 1)))
        limit = tf.constant(2 if hvd.rank() == 1 else 6)

        def train() -> Any:
            steps = tf.constant(0)
            for rows in data:
                if steps == limit:
                    break
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weights * rows)
                (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weights])
                weights.assign_sub(0.1 * gradient)
                steps += 1
            return steps

        words = ("ank 1 ", "shut hvdkit down") if ending == "shutdown" else ("rank 1 ", "the same operations")
        if hvd.rank() != 1:
            _fails(tf.function(train), *words)
            np.testing.assert_allclose(weights.numpy(), [0.8], rtol=1e-6)  # of the steps that all ranks made
            return
        assert int(tf.function(train)()) == 2
        if ending == "allreduce":
            _fails(lambda: hvd.allreduce(tf.constant(1.0), name="loss"), *words)


def refusals() -> None:
    """What cannot be is refused at once, with what to do."""
    try:
        hvd.DistributedGradientTape(tf.GradientTape())
    except ValueError as error:
        assert "hvd.init()" in str(error)
    with joined():
        variable = tf.Variable([1.0])

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = variable * 2
            return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

        _fails(tf.function(step, jit_compile=True), "jit_compile=True", "outside of that function")
        inner = tf.function(step)
        _fails(tf.function(lambda: inner(), jit_compile=True), "jit_compile=True", "outside of that function")

        def compute() -> Any:
            with tf.GradientTape() as tape:
                loss = variable * 2
            return tape.gradient(loss, [variable])

        compiled = tf.function(compute, jit_compile=True)
        outside = tf.function(lambda: [hvd.allreduce(one, op=hvd.Sum) for one in compiled()])
        np.testing.assert_array_equal(outside()[0], [2 * hvd.size()])
        assert hvd.gpu_available("tensorflow") is hvd.gpu_available(verbose=True) is util.gpu_available("tensorflow")
        _fails(lambda: hvd.gpu_available("torch"), "hvdkit.common.util.gpu_available('torch')")
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"op": hvd.Max}, "op"),
            ({"num_groups": -1}, "num_groups"),
            ({"compression": "fp16"}, "compression"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ]
        for wrong, word in wrongs:
            _fails(functools.partial(hvd.DistributedGradientTape, tf.GradientTape(), **wrong), word)
        _fails(
            lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[variable]),
            "must hold Keras layers",
        )
        with tf.GradientTape(persistent=True) as tape:
            loss = variable * 2
        distributed = hvd.DistributedGradientTape(tape)
        for name in ("jacobian", "batch_jacobian"):
            call = functools.partial(getattr(distributed, name), loss, variable)
            _fails(call, f"Call {name}() of the tape that you wrapped")
        np.testing.assert_array_equal(tape.jacobian(loss, variable), [[2.0]])
        for shape in (None, [None]):
            free = tf.Variable([1.0], name="free", shape=tf.TensorShape(shape))
            call = functools.partial(distributed.gradient, loss, [variable, free])
            _fails(call, "free has shape", "without shape=")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.complex(variable, variable))
        _fails(lambda: hvd.DistributedGradientTape(tape).gradient(loss, [tf.Variable([1j])]), "complex")


def adasum(mode: str) -> None:
    """The tape's op=Adasum is that of allreduce, also on a process set."""
    with joined():
        pair = hvd.add_process_set([0, hvd.size() - 1])
        variable = tf.Variable([1.0, 2.0])

        def step(rank: Any, process_set: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * tf.stack([rank + 1.0, 1.0]))
            return hvd.DistributedGradientTape(tape, op=hvd.Adasum, process_set=process_set).gradient(loss, [variable])

        for process_set in (hvd.global_process_set, pair):
            (found,) = in_mode(mode, lambda rank, s=process_set: step(rank, s))(tf.constant(float(hvd.rank())))
            own = tf.constant([hvd.rank() + 1.0, 1.0])
            expected = hvd.allreduce(own, op=hvd.Adasum, process_set=process_set) if process_set.included() else own
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        _fails(
            lambda: hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, [tf.Variable(1.0)]),
            "none of the 1 variables",
        )


def batch_normalization(mode: str) -> None:
    """Output, gradients and running statistics are those of one layer that sees all ranks' batches as one."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        random = np.random.RandomState(0)
        # A mean far from zero: squares of such values have no digits left for the variance.
        whole = (random.randn(3 * size + 3, 4, 5) + 100 * np.arange(5)).astype("float32")
        weight = random.randn(*whole.shape).astype("float32")
        start, stop = 3 * rank + min(rank, 1) * 3, 3 * rank + 6  # rank 0 has more rows than the others
        layers = [keras.layers.BatchNormalization(momentum=0.5), hvd.SyncBatchNormalization(momentum=0.5)]
        for layer in layers:
            layer.build((None, 4, 5))

        def run(layer: Any, x: Any, weight: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * weight)
            return [y, *tape.gradient(loss, [x, *layer.trainable_weights])]

        expected = run(layers[0], tf.constant(whole), tf.constant(weight))
        function = in_mode(mode, lambda x, w: run(layers[1], x, w))
        found = function(tf.constant(whole[start:stop]), tf.constant(weight[start:stop]))
        for one, two in zip(found[:2], expected[:2], strict=True):
            np.testing.assert_allclose(one, two[start:stop], rtol=0, atol=1e-3)
        for one, two in zip(found[2:], expected[2:], strict=True):  # Keras subtracts large sums from each other here
            np.testing.assert_allclose(hvd.allreduce(one, op=hvd.Sum), two, rtol=0, atol=5e-3)
        for one, two in zip(layers[1].non_trainable_weights, layers[0].non_trainable_weights, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)
        for one in layers:
            np.testing.assert_array_equal(one(whole), one(whole, training=False))
        mask = np.arange(4) < 2 + (np.arange(len(whole)) % 2)[:, None]
        masked = layers[0](tf.constant(whole), training=True, mask=mask)
        part = layers[1](tf.constant(whole[start:stop]), training=True, mask=mask[start:stop])
        np.testing.assert_allclose(part, masked[start:stop], rtol=0, atol=1e-3)
        turned = hvd.SyncBatchNormalization(axis=1)(np.swapaxes(whole[start:stop], 1, 2), training=True)
        np.testing.assert_allclose(np.swapaxes(turned, 1, 2), expected[0][start:stop], rtol=0, atol=1e-3)
        again = hvd.SyncBatchNormalization.from_config(layers[1].get_config())
        assert again.momentum == 0.5


def state() -> None:
    """Both states: commit, restore, sync."""
    with joined():
        model, variable = make_model(), tf.Variable([1.0])
        model.compile(keras.optimizers.Adam(0.01))
        model.optimizer.build(model.trainable_variables)
        made = hvd.elastic.TensorFlowKerasState(model, epoch=3)
        plain = hvd.elastic.TensorFlowState([variable], batch=0)
        before = [one.numpy().copy() for one in [*model.variables, *model.optimizer.variables]]

        def train_a_bit() -> None:
            train(model, model.optimizer, mine(make_data(batches=2)), rows=ROWS)  # alone: ranks differ
            variable.assign_add([1.0 + hvd.rank()])
            made.epoch, plain.batch = 4, plain.batch + 1

        train_a_bit()
        assert any(np.any(one.numpy() != two) for one, two in zip(model.variables, before, strict=False))
        made.restore()
        plain.restore()
        assert (made.epoch, plain.batch, variable.numpy().tolist()) == (3, 0, [1.0])
        for one, two in zip([*model.variables, *model.optimizer.variables], before, strict=True):
            np.testing.assert_array_equal(one, two)
        train_a_bit()
        made.commit()
        plain.commit()
        made.sync()
        plain.sync()
        assert_alike(model, model)
        assert variable.numpy().tolist() == [2.0]
        told = hvd.allgather_object([one.numpy() for one in model.optimizer.variables])
        for other in told:
            for one, two in zip(told[0], other, strict=True):
                np.testing.assert_array_equal(one, two)


def both_frameworks() -> None:
    """A torch optimizer and a tape in the same process and the same world, in turns."""
    import torch

    import hvdkit.torch

    torch.set_num_threads(1)
    with joined():
        assert hvdkit.torch.rank() == hvd.rank()
        weights = torch.nn.Parameter(torch.ones(70000))
        optimizer = hvdkit.torch.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)])
        model, reference = make_model(), make_model()
        data = make_data(batches=3)
        train(reference, keras.optimizers.SGD(0.1), data, rows=ROWS * hvd.size())
        plain = keras.optimizers.SGD(0.1)
        for x, y in batches(mine(data), ROWS):
            optimizer.zero_grad()
            (weights.sum() * hvd.rank()).backward()
            with tf.GradientTape() as tape:
                loss = squared(model(x), y)
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
            plain.apply(gradients, model.trainable_variables)
            optimizer.step()
        assert_alike(model, reference)
        assert set(weights.detach().tolist()) == {1 - 3 * (hvd.size() - 1) / 2}
        assert hvdkit.torch.allreduce(torch.ones(2), op=hvdkit.torch.Sum).tolist() == [hvd.size()] * 2
        if os.environ.get("HVDKIT_ENGINE") != "horovod":  # whose core does not add it
            half = torch.ones(9000, dtype=torch.bfloat16)
            assert set(hvdkit.torch.allreduce(half, op=hvdkit.torch.Sum).tolist()) == {hvd.size()}
    assert not hvdkit.torch.is_initialized()


def interrupted() -> None:
    """Rank 0's step fails after part of its gradients has been sent, and it goes on: an error."""
    with joined(fusion_bytes=1024):
        first, last = tf.Variable(tf.ones(1000), name="first"), tf.Variable(tf.ones(1000), name="last")

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def shortened(x: Any, count: Any) -> Any:
            return x, lambda grad: (tf.boolean_mask(grad, tf.range(1000) < count), None)

        def compute(count: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(shortened(first, count) * last)
            return hvd.DistributedGradientTape(tape).gradient(loss, [first, last])

        step = tf.function(compute)
        step(tf.constant(1000))
        if hvd.rank() == 0:
            _fails(lambda: step(tf.constant(500)), "gradient of first has shape (500,), but the variable has (1000,)")
        step(tf.constant(1000))


def two_threads(mode: str) -> None:
    """A step that begins while another one of the same variables is under way is an error of both and of later ones."""
    with joined():
        weights = tf.Variable([1.0], name="shared")

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = weights * 2
            return hvd.DistributedGradientTape(tape).gradient(loss, [weights])

        function, failed = in_mode(mode, step), []
        np.testing.assert_array_equal(function()[0], [2.0])
        if hvd.rank() > 0:
            hvd.barrier()
            np.testing.assert_array_equal(function()[0], [2.0])
            return

        def wait_for_the_others() -> None:
            _fails(function, "twice at once", "(shared)", "in the same order on all ranks")
            failed.append(True)

        (sync,) = (one for key, one in _syncs.items() if key[0][0].name == "shared" and one._gradients)
        assert isinstance(sync._gradients, ArrayGradients)
        working = sync._gradients._sync.one_step._working
        thread = threading.Thread(target=wait_for_the_others)
        thread.start()
        seen = 0
        while seen < 20:  # in a row: it waits for the other ranks
            thread.join(0.01)
            seen = seen + 1 if working.locked() else 0
        _fails(step, "twice at once", "(shared)")
        hvd.barrier()
        thread.join()
        assert failed
        _fails(step, "twice at once", "(shared)")


def docstrings() -> None:
    """Assert that every public function states its tensors and errors."""
    assert [fault for name in functions_of(hvd) for fault in docstring_faults(hvd, name)] == []
