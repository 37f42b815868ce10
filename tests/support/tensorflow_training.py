"""Bodies for ranks that train through DistributedGradientTape, each compared with one process and the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from averaging import NamedAverage, PeriodicAverage
from keras_training import ROWS, assert_alike, make_data, make_model, mine, raises
from tensorflow_world import in_mode, joined

import hvdkit.tensorflow as hvd

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}
Wrap = Callable[[Any], Any]


def _same(tape: Any) -> Any:
    return tape


def squared(outputs: Any, y: Any) -> Any:
    """The mean squared error."""
    return tf.reduce_mean(tf.square(outputs - y))


def batches(data: Sequence[Any], rows: int) -> list[list[Any]]:
    """The data as tensors, so many rows at a time."""
    return [[tf.constant(one[at : at + rows]) for one in data] for at in range(0, len(data[0]), rows)]


def train(
    model: Any, optimizer: Any, data: Sequence[Any], *, rows: int, mode: str = "eager", wrap: Wrap = _same
) -> int:
    """One epoch in order, with `wrap` around the tape. Returns how often the step was traced, or run eagerly."""
    traced = []
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        traced.append(1)
        with tf.GradientTape() as tape:
            loss = squared(model(x, training=True), y)
            if hasattr(optimizer, "scale_loss"):
                loss = optimizer.scale_loss(loss)
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    function = in_mode(mode, step)
    for x, y in batches(data, rows):
        function(x, y)
    return len(traced)


def as_one_process(
    mode: str,
    names: Sequence[str],
    transport: str = "auto",
    wrap: dict[str, Any] | None = None,
    comm: Sequence[int] | None = None,
) -> None:
    """These optimizers, started from rank 0's variables, do what they do in one process."""
    with joined(transport, **({} if comm is None else {"comm": comm})):
        data = make_data()
        for name in names:
            reference, model = make_model(), make_model()
            plain, optimizer = OPTIMIZERS[name](), OPTIMIZERS[name]()
            for each in (plain, optimizer):
                each.build(reference.trainable_variables if each is plain else model.trainable_variables)
            if hvd.rank() > 0:
                for variable in [*model.variables, *optimizer.variables]:
                    variable.assign(variable + tf.ones_like(variable))
            in_mode(mode, lambda m=model, o=optimizer: hvd.broadcast_variables([*m.variables, *o.variables], 0))()
            train(reference, plain, data, rows=ROWS * hvd.size())
            traced = train(model, optimizer, mine(data), rows=ROWS, mode=mode, wrap=_distributed(**(wrap or {})))
            assert_alike(model, reference, 5e-3 if (wrap or {}).get("compression") else 1e-5)
            assert traced == 1 or mode == "eager"


def _distributed(**options: Any) -> Wrap:
    compression = options.pop("compression", "none")
    if isinstance(compression, str):
        compression = getattr(hvd.Compression, compression)
    return lambda tape: hvd.DistributedGradientTape(tape, compression=compression, **options)


def accumulation(mode: str) -> None:
    """Keras's windows of reduced gradients, and Horovod's, which are reduced once."""
    with joined():
        data = make_data(batches=4)
        reference, by_keras, by_passes = make_model(), make_model(), make_model()

        def make(rate: float = 0.05) -> Any:
            return keras.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=2)

        train(reference, make(), data, rows=ROWS * hvd.size())
        train(by_keras, make(), mine(data), rows=ROWS, mode=mode, wrap=hvd.DistributedGradientTape)
        assert_alike(by_keras, reference)
        passes = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        train(by_passes, passes, mine(data), rows=ROWS, mode=mode)
        assert_alike(by_passes, reference)


def mixed_precision() -> None:
    """mixed_float16 with a loss scale: where one rank's gradients are infinite, all ranks skip the step."""
    with joined():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            data = make_data(batches=8)
            data[1][2 * ROWS * hvd.size() + 1] = 6e4  # in the third batch, on rank 0
            reference, model = make_model(), make_model()
            optimizers = [
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=2.0**10)
                for _ in range(2)
            ]
            train(reference, optimizers[0], data, rows=ROWS * hvd.size())
            train(model, optimizers[1], mine(data), rows=ROWS, mode="graph", wrap=hvd.DistributedGradientTape)
        finally:
            keras.config.set_dtype_policy("float32")
        scales = [float(np.array(one.dynamic_scale)) for one in optimizers]
        assert scales[0] == scales[1] < 2.0**10
        # float16 products of other batch shapes are rounded otherwise: 2^-11 of an update each time.
        assert_alike(model, reference, 5e-3)


def embedding(mode: str) -> None:
    """Gradients of an embedding, as rows and as a dense tensor, are those of the whole batch; of one rank too."""
    with joined():
        random = np.random.RandomState(0)
        words = random.randint(0, 30, (ROWS * hvd.size(), 3))
        table, other = tf.Variable(random.randn(30, 4), name="table"), tf.Variable(random.randn(4), name="other")

        def gradients(words: Any, wrap: Wrap) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.gather(table, words) * other))
            return wrap(tape).gradient(loss, [table, other])

        part = words[ROWS * hvd.rank() :][:ROWS]
        expected = [tf.convert_to_tensor(one) for one in gradients(words, _same)]
        for options, kind in (({}, tf.IndexedSlices), ({"sparse_as_dense": True}, tf.Tensor)):
            compute = in_mode(mode, lambda w, o=options: gradients(w, _distributed(**o)))
            for _ in range(3):
                found = compute(tf.constant(part))
                assert isinstance(found[0], kind)
                for one, two in zip(found, expected, strict=True):
                    np.testing.assert_allclose(tf.convert_to_tensor(one), two, rtol=0, atol=1e-12)
            summed = in_mode(mode, lambda w, o=options: gradients(w, _distributed(op=hvd.Sum, **o)))(tf.constant(part))
            np.testing.assert_allclose(tf.convert_to_tensor(summed[0]), expected[0] * hvd.size(), rtol=0, atol=1e-12)


def partial(mode: str) -> None:
    """A local layer's gradients stay on their rank, divided by the number of ranks; the others are averaged."""
    with joined():
        model = make_model()
        x, y = (tf.constant(one) for one in make_data(batches=1))
        mine_x, mine_y = (tf.constant(one) for one in mine((x.numpy(), y.numpy())))
        local = model.get_layer("hidden")

        def gradients(x: Any, y: Any, wrap: Wrap = _same) -> Any:
            with tf.GradientTape() as tape:
                loss = squared(model(x), y)
            return wrap(tape).gradient(loss, model.trainable_weights)

        whole, own = gradients(x, y), gradients(mine_x, mine_y)
        for scale in (True, False):

            def wrap(tape: Any, scale: bool = scale) -> Any:
                return hvd.PartialDistributedGradientTape(tape, local_layers=local, scale_local_gradients=scale)

            found = in_mode(mode, lambda x, y, w=wrap: gradients(x, y, w))(mine_x, mine_y)
            divided = [one / (hvd.size() if scale else 1) for one in own[:2]]
            for one, two in zip(found, [*divided, *whole[2:]], strict=True):
                np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)
        with tf.GradientTape() as tape:
            loss = squared(model(mine_x), mine_y)
        wrapped = hvd.PartialDistributedGradientTape(tape, local_layers=[local])
        kept, shared = wrapped.get_local_and_global_gradients(loss, model.trainable_weights)
        assert [source.path for source, _ in kept] == [one.path for one in local.trainable_weights]
        np.testing.assert_allclose(shared[0][1], whole[2], rtol=0, atol=1e-6)


def model_parallel(mode: str) -> None:
    """Each rank's own table, of another size on each, gives rows to all of them; the other weights are shared."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        table, shared = tf.Variable(tf.fill([rank + 2, 2], rank + 1.0)), tf.Variable(tf.ones([size, 2]))

        def step(words: Any) -> Any:
            with tf.GradientTape() as tape:
                rows = hvd.alltoall(tf.gather(table, words))
                loss = (rank + 1.0) * tf.reduce_sum(rows * shared)
            wrapped = hvd.DistributedGradientTape(tape)
            wrapped.register_local_source(table)
            own, mean = wrapped.gradient(loss, [table, shared])
            return tf.convert_to_tensor(own), mean

        own, mean = in_mode(mode, step)(tf.fill([size], rank + 1))
        expected = np.zeros((rank + 2, 2))
        expected[rank + 1] = (size + 1) / 2  # of the losses of all ranks, divided by their number
        np.testing.assert_allclose(own, expected, rtol=1e-6)
        np.testing.assert_allclose(mean, (np.arange(size) + 1)[:, None] * np.full((1, 2), (size + 1) / 2), rtol=1e-6)


def sets_and_several_tapes(mode: str) -> None:
    """A process set trains by itself beside the tapes of all, of which there are several in a step."""
    with joined():
        pair = hvd.add_process_set([0, hvd.size() - 1])
        variables = [tf.Variable(tf.fill([count], 1.0), name="weights") for count in (3, 3, 70000)]
        rank = tf.constant(float(hvd.rank()))

        def step(rank: Any) -> Any:
            made = []
            for process_set in (hvd.global_process_set, pair, hvd.global_process_set):
                for variable in variables:
                    with tf.GradientTape(persistent=True) as tape:
                        loss = tf.reduce_sum(variable) * rank
                    wrapped = hvd.DistributedGradientTape(tape, process_set=process_set)
                    made.append(wrapped.gradient(loss, {"only": variable})["only"])
            return made

        function = in_mode(mode, step)
        mean = (hvd.size() - 1) / 2
        own = mean if pair.included() else hvd.rank()
        kept = [function(rank * at) for at in range(1, 5)]
        for at, gradients in enumerate(kept, start=1):  # later steps have not written to what the user kept
            found = [set(one.numpy().tolist()) for one in gradients]
            assert found == [{mean * at}] * 3 + [{own * at}] * 3 + [{mean * at}] * 3
        hvd.remove_process_set(pair)


def join(mode: str, sparse: bool) -> None:
    """Ranks with fewer batches join after their last, and count as zeros from then on."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        pair = hvd.add_process_set([0, size - 1])
        table, dense = tf.Variable(tf.zeros([4, 2]), name="table"), tf.Variable(tf.zeros(70000), name="dense")

        def step(weight: Any, at: Any, process_set: Any = hvd.global_process_set) -> Any:
            with tf.GradientTape() as tape:
                rows = tf.gather(table, at) if sparse else table
                loss = weight * (tf.reduce_sum(dense) + tf.reduce_sum(rows))
            wrapped = hvd.DistributedGradientTape(tape, process_set=process_set)
            first, second = wrapped.gradient(loss, [table, dense])
            return tf.reduce_sum(tf.convert_to_tensor(first)) / (2 if sparse else 8), second[0]

        everyone = in_mode(mode, step)
        some = in_mode(mode, lambda weight, at: step(weight, at, pair))
        for _ in range(2):  # epochs
            for batch in range(rank + 1):
                there = [1.0 + one for one in range(size) if one >= batch]
                pairs = [1.0 + one for one in (0, size - 1) if one >= batch]
                for function, given, among in ((everyone, there, size), (some, pairs, 2)):
                    if function is some and not pair.included():
                        continue
                    found = function(tf.constant(rank + 1.0), tf.constant([batch]))
                    np.testing.assert_allclose(found, [sum(given) / among] * 2, rtol=1e-6)
            assert int(in_mode(mode, hvd.join)()) == size - 1


def tuned(mode: str, log: str) -> None:
    """While the engine's settings are searched every gradient is the average, in every step."""
    counts = (300_000, 7, 900_000, 64)
    with joined(autotune=True, autotune_steps=60, autotune_log=log if mode == "graph" else ""):
        variables = [tf.Variable(tf.zeros(count), name=f"v{count}") for count in counts]
        mean_rank = (hvd.size() - 1) / 2

        def compute(step: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.add_n([tf.reduce_sum(one * (at + step)) for at, one in enumerate(variables)])
                loss *= tf.cast(hvd.rank(), tf.float32)
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        function = in_mode(mode, compute)
        for step in range(65):
            for at, gradient in enumerate(function(tf.constant(float(step)))):
                assert np.array_equal(gradient.numpy(), np.full(counts[at], mean_rank * (at + step), np.float32))


def in_a_part(mode: str) -> None:
    """The job's ranks 2 and 1, in this order, train; rank 0 calls nothing of hvdkit."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank:
        as_one_process(mode, ["SGD"], comm=[2, 1])


def refused_strategies() -> None:
    """A tape knows of no step of an optimizer, and says one thing about gradients."""
    with joined():
        with raises(ValueError, "after the optimizer's step"):
            hvd.DistributedGradientTape(tf.GradientTape(), strategy=PeriodicAverage(2))
        with raises(ValueError, "cannot be combined with op"):
            hvd.DistributedGradientTape(tf.GradientTape(), strategy=NamedAverage(), op=hvd.Sum)
