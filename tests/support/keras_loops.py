"""Bodies for ranks: what surrounds training with Keras, on any backend."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, cast

import keras
import ml_dtypes
import numpy as np
from keras_training import ROWS, assert_alike, fit, joined, make_data, make_model, mine, raises
from numbers_of_ranks import INTEGERS

import hvdkit.keras as hvd
from hvdkit.keras.validation import counted_once
from hvdkit.transport.buffer import FLOAT8


def saved_and_loaded(folder: str) -> None:
    """A file of a wrapped run is the same as of a plain one, and either goes on training, wrapped or not."""
    with joined():
        data = make_data()
        model, reference = make_model(), make_model()
        fit(reference, keras.optimizers.Adam(0.01, clipnorm=1.0), data, rows=ROWS * hvd.size())
        fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0)), mine(data), rows=ROWS)
        serialized = keras.saving.serialize_keras_object
        plain, wrapped = serialized(reference.optimizer), serialized(model.optimizer)
        assert {**wrapped["config"], "name": ""} == {**plain["config"], "name": ""}
        assert {**wrapped, "config": 0} == {**plain, "config": 0}

        of_many, of_one = str(Path(folder, "many.keras")), str(Path(folder, "one.keras"))
        if hvd.rank() == 0:
            model.save(of_many)
            reference.save(of_one)
        hvd.barrier()
        loaded = keras.saving.load_model(of_many)  # without hvdkit
        assert type(loaded.optimizer) is type(reference.optimizer)
        again = hvd.load_model(of_one)
        once_more = hvd.load_model(of_many)
        for one, some, rows in (
            (reference, data, ROWS * hvd.size()),
            (loaded, data, ROWS * hvd.size()),
            (again, mine(data), ROWS),
            (once_more, mine(data), ROWS),
        ):
            one.fit(*some, batch_size=rows, epochs=1, shuffle=False, verbose=0)
        for one in (loaded, again, once_more):
            assert int(np.array(one.optimizer.iterations)) == 18
            assert_alike(one, reference)
        hvd.barrier()


def resumed(folder: str) -> None:
    """Training that was interrupted goes on as if it had not been; only rank 0 wrote, and the others have nothing."""
    with joined():
        data, path = make_data(), str(Path(folder, "resumed.keras"))
        uninterrupted, model = make_model(), make_model()
        part = mine(data)
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.8)
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
        fit(uninterrupted, wrapped, part, rows=ROWS, epochs=4)
        save = hvd.callbacks.ModelCheckpoint(path)
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
        fit(model, wrapped, part, rows=ROWS, epochs=2, callbacks=[save])
        hvd.barrier()
        if hvd.rank() == 0:
            model = hvd.load_model(path)
        else:
            model = make_model()
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), "mse")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*part, batch_size=ROWS, initial_epoch=2, epochs=4, shuffle=False, verbose=0, callbacks=[start])
        assert_alike(model, uninterrupted)
        hvd.barrier()


def local_variables() -> None:
    """The callback leaves local variables to each rank, and gives the others root's value."""
    with joined():
        model, own = make_model(), hvd.rank() + 1
        model.set_weights([np.full_like(weight, own) for weight in model.get_weights()])
        hidden = model.get_layer("hidden")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=hidden.kernel)
        start.register_local_var(hidden.bias)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
        fit(model, optimizer, mine(make_data(batches=1)), rows=ROWS, epochs=1, callbacks=[start])
        expected = {"hidden": own, "out": 1}
        for name, value in expected.items():
            assert all((weight == value).all() for weight in model.get_layer(name).get_weights()), name


def metrics() -> None:
    """Unequal shards: the logs of each epoch are those of one process, also of metrics that are no means."""
    with joined():
        random = np.random.RandomState(0)
        rows = 24 * hvd.size()
        x = random.randn(rows, 12).astype("float32")
        y = random.randint(0, 2, (rows, 1)).astype("float32")
        val = random.randn(23, 12).astype("float32"), random.randint(0, 2, (23, 1)).astype("float32")

        class Share(keras.metrics.Metric):
            """A metric of one's own whose state is no sum."""

            def __init__(self) -> None:
                super().__init__(name="share")
                self.share = self.add_variable(shape=(), initializer="zeros", name="share")

            def update_state(self, truth: Any, predicted: Any, sample_weight: Any = None) -> None:
                self.share.assign(keras.ops.mean(keras.ops.cast(truth, "float32")))

            def result(self) -> Any:
                return self.share.value

        def make() -> Any:
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, activation="sigmoid")])
            auc = keras.metrics.AUC(num_thresholds=20, name="auc")
            kinds = ["accuracy", auc, keras.metrics.Precision(name="right"), Share()]
            model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=kinds)
            return model

        whole, model = make(), make()
        told = whole.fit(
            x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0, validation_data=val, validation_batch_size=23
        ).history
        model.optimizer = hvd.DistributedOptimizer(model.optimizer)
        part = hvd.shard((x, y))
        val_part = hvd.shard(val)  # a row is on two ranks
        seen = model.fit(
            *part,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=val_part,
            validation_batch_size=23,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        ).history
        del told["share"], seen["share"]  # of a training batch: those of one process are others
        assert seen.keys() == told.keys(), (sorted(seen), sorted(told))
        for name in told:
            np.testing.assert_allclose(seen[name], told[name], rtol=2e-6, err_msg=name)
        exact = whole.evaluate(*val, batch_size=23, return_dict=True, verbose=0)
        tensors = [keras.ops.convert_to_tensor(array) for array in val]
        parts: list[Any] = [
            val_part,
            hvd.shard(val, evaluation=True),
            hvd.shard(tuple(tensors)),
            (*val_part, np.ones(len(val_part[0]), "float32")),
            (hvd.shard(_Rows(*val)),),
        ]
        assert len({len(one) for one in hvd.allgather_object(parts[1][0][:, 0].tolist())}) == 2, "equal shards"
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            parts.append((hvd.shard(tf.data.Dataset.from_tensor_slices(val).batch(1)),))
        if keras.backend.backend() == "jax" and hvd.rank():
            with raises(ValueError, "fewer rows for the evaluation than ranks"):
                model.evaluate(*hvd.shard((val[0][:1], val[1][:1])))
        for part in parts:
            given = dict(zip(("x", "y", "sample_weight"), part, strict=False))
            mine_alone = hvd.evaluate(model, **given, batch_size=None if len(part) == 1 else 23)
            for name in exact if len(part) > 1 else exact.keys() - {"share"}:  # which is of the last batch
                np.testing.assert_allclose(mine_alone[name], exact[name], rtol=2e-6, err_msg=name)


def views() -> None:
    """Views of what shard() has returned are validated without its repeated row, wherever a rank is the third of 3."""
    x, y = np.random.RandomState(0).randn(10, 12).astype("float32"), np.arange(10.0, dtype="float32")[:, None]
    for whole in (x, np.asfortranarray(x)):
        part = hvd.shard(whole, rank=2, size=3)  # rows 2, 5, 8 and again 1
        assert len(part) == 4
        for view, kept in (
            (part[:], [2, 5, 8]),
            (part[1:], [5, 8]),
            (part[:3], [2, 5, 8]),
            (part[1::2], [5]),
            (part[::-1], [1, 8, 5, 2]),  # not its last row
            (part[:, :3], [2, 5, 8]),
            (part[1:][:, None], [5, 8]),
            (part.copy(), [2, 5, 8, 1]),
            (part[-1:], [1]),
        ):
            rows = view.reshape(len(view), -1)[: len(kept)]
            given = counted_once(view)
            assert len(given) == len(kept), kept
            np.testing.assert_array_equal(given.reshape(len(kept), -1), rows)
            np.testing.assert_array_equal(rows, x[kept][:, : rows.shape[1]])
    unpadded = hvd.shard(x, rank=0, size=3)
    assert counted_once(unpadded[:]).shape == (4, 12)

    def train(**options: Any) -> dict[str, list[float]]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history: dict[str, list[float]] = model.fit(verbose=0, shuffle=False, epochs=2, **options).history
        return history

    mine = hvd.shard((x, y), rank=2, size=3)
    weights = np.arange(1.0, 5.0, dtype="float32")
    for given, more in (
        ({"x": mine[0], "y": mine[1]}, ()),
        ({"x": mine[0], "y": mine[1], "sample_weight": weights}, (weights[2:3],)),
    ):
        split = train(**given, validation_split=0.5)
        apart = train(**{name: array[:2] for name, array in given.items()}, validation_data=(x[[8]], y[[8]], *more))
        assert split == apart, "the last two rows are 8 and again 1"
    plain = {"x": x[:4], "y": y[:4]}  # divided by Keras itself
    first = {name: array[:2] for name, array in plain.items()}
    assert train(**plain, validation_split=0.5) == train(**first, validation_data=(x[2:4], y[2:4]))


class _Rows(keras.utils.PyDataset):
    """Batches of one row."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index : index + 1], self.y[index : index + 1]


class _Told(keras.callbacks.Callback):
    """Puts a number of its own into the logs, other on each rank."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["told"] = self.values[epoch]


def early_stopping() -> None:
    """Ranks that see other values stop after the same epoch, with the same weights."""
    with joined():
        part = mine(make_data())
        model = make_model()
        # On rank 0 it gets worse at once, on the others later; the mean does in the fourth epoch.
        values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5] if hvd.rank() == 0 else [9.0, 8.0, 7.0, 8.0, 9.0, 10.0]
        stop = hvd.callbacks.EarlyStopping(monitor="told", patience=1, mode="min", restore_best_weights=True)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        history = fit(model, optimizer, part, rows=ROWS, epochs=6, callbacks=[_Told(values), stop])
        assert isinstance(stop, keras.callbacks.EarlyStopping)
        assert len(history.epoch) == 4
        assert_alike(model, model)


def progress(folder: str) -> None:
    """Only rank 0 shows progress and writes files, whatever the script says."""
    with joined():
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        path = Path(folder, str(hvd.rank()))
        path.mkdir()

        class Writes(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                (path / "own").touch()

        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = str(path / "best.keras")
        weights = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
        weights.filepath = str(path / "best.weights.h5")
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.ModelCheckpoint(str(path / "model.keras")),
            hvd.callbacks.CSVLogger(str(path / "log.csv")),
            hvd.callbacks.on_rank_zero(Writes()),
            best,
            weights,
        ]
        # It writes with TensorFlow, whatever the backend.
        board = all(importlib.util.find_spec(one) is not None for one in ("tensorflow", "tensorboard"))
        if board:
            callbacks.append(hvd.callbacks.TensorBoard(str(path / "board")))
        model.compile(optimizer, "mse")
        model.fit(*mine(make_data()), batch_size=ROWS, epochs=1, verbose=2, callbacks=callbacks)
        written = {one.name for one in path.iterdir()} - {"board"}
        expected = {"model.keras", "log.csv", "own", "best.keras", "best.weights.h5"}
        assert written == (expected if hvd.rank() == 0 else set()), written
        assert (path / "board").exists() == (hvd.rank() == 0 and board)


def learning_rates() -> None:
    """The warm-up ends at the full rate after a straight line; momentum is corrected; a schedule takes over."""
    with joined():
        size, part = hvd.size(), mine(make_data(batches=4))
        model = make_model()
        rates: list[float] = []

        class Seen(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                rates.append(float(self.model.optimizer.learning_rate))

        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=0),
            hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1 ** (epoch - 1), start_epoch=2),
            Seen(),
        ]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9))
        history = fit(model, optimizer, part, rows=ROWS, epochs=4, callbacks=callbacks)
        line = [0.4 / size * (1 + (size - 1) * step / 8) for step in range(1, 9)]
        np.testing.assert_allclose(rates, [*line, *[0.04] * 4, *[0.004] * 4], rtol=1e-5)
        np.testing.assert_allclose(history.history["lr"], [line[3], 0.4, 0.04, 0.004], rtol=1e-5)


def momentum_correction() -> None:
    """A momentum that holds past rates is scaled with the rate; the update is then that of Goyal et al."""
    with joined():
        x, y = mine(make_data(batches=2))
        model, plain = make_model(), make_model()
        halve = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=False, steps_per_epoch=1)
        fit(plain, keras.optimizers.SGD(0.1, momentum=0.9), (x[:ROWS], y[:ROWS]), rows=ROWS, epochs=1)
        fit(model, keras.optimizers.SGD(0.1, momentum=0.9), (x[:ROWS], y[:ROWS]), rows=ROWS, epochs=1)
        for momentum in plain.optimizer.momentums:
            momentum.assign(momentum * 0.5)
        plain.optimizer.learning_rate = 0.05
        plain.fit(x[ROWS:], y[ROWS:], batch_size=ROWS, verbose=0)
        model.fit(
            x[ROWS:], y[ROWS:], batch_size=ROWS, verbose=0, initial_epoch=1, epochs=2, shuffle=False, callbacks=[halve]
        )
        for one, two in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-7)


def values() -> None:
    """Collectives on numbers, arrays and tensors."""
    with joined():
        rank, size = hvd.rank(), hvd.size()
        assert hvd.allreduce(float(rank)) == (size - 1) / 2
        assert hvd.allreduce(rank, op=hvd.Sum) == hvd.allreduce(rank, average=False) == size * (size - 1) // 2
        tensor = keras.ops.ones((2, 3)) * rank
        summed = hvd.allreduce(tensor, op=hvd.Max, name="largest")
        assert keras.ops.is_tensor(summed)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(summed), np.full((2, 3), size - 1.0))
        core = os.environ.get("HVDKIT_ENGINE") == "horovod"
        low = hvd.allreduce(np.array([1 / 3], np.float32), compression=hvd.Compression.fp16)
        np.testing.assert_array_equal(low, np.float32(np.float16(1 / 3)))
        large = np.array([60000, -1e30, np.inf, 3], np.float64)
        averaged = hvd.allreduce(large, compression=hvd.Compression.fp16)
        assert averaged.dtype == np.float64
        np.testing.assert_allclose(averaged, [60000, -65504, np.inf, 3], rtol=2e-3)
        gathered = hvd.allgather(np.full((rank + 1, 2), rank, "int32"))
        assert gathered[:, 0].tolist() == [one for one in range(size) for _ in range(one + 1)]
        assert hvd.broadcast(np.arange(3) * rank, root_rank=1).tolist() == [0, 1, 2]
        for dtype in (*INTEGERS, "complex64", "complex128"):
            every = hvd.allgather(np.full((1,), rank, dtype))
            assert every.dtype == dtype and every.tolist() == list(range(size))
            if core and dtype not in ("int8", "uint8", "int32", "int64"):
                with raises(TypeError, f"cannot reduce {dtype}, only"):
                    hvd.allreduce(np.full((2,), rank + 1, dtype), op=hvd.Sum)
                continue
            assert hvd.allreduce(np.full((2,), rank + 1, dtype), op=hvd.Sum).tolist() == [size * (size + 1) // 2] * 2
        assert core or hvd.allreduce(np.full((2,), 200, "uint8")).tolist() == [200, 200]
        for name in FLOAT8:
            bits = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name))
            moved = hvd.broadcast(bits if rank == 1 else bits[::-1], 1)
            assert moved.dtype == bits.dtype and moved.tobytes() == bits.tobytes()
            with raises(TypeError, f"op sum of {name}"):
                hvd.allreduce(bits, op=hvd.Sum)
        tiny = keras.ops.cast(keras.ops.ones((2,)), "float8_e4m3fn")
        assert keras.backend.standardize_dtype(hvd.broadcast(tiny, 0).dtype) == "float8_e4m3fn"
        scattered = hvd.reducescatter(np.ones((size, 2), "float32") * np.arange(size)[:, None], op=hvd.Sum)
        np.testing.assert_array_equal(scattered, np.full((1, 2), rank * size))
        with raises(NotImplementedError, "op is hvd.Max"):
            hvd.reducescatter(np.ones(size, "float32"), op=hvd.Max)
        assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
        assert hvd.allgather_object(rank) == list(range(size))
        variables = [
            keras.Variable(np.full((2,), rank, "float32")),
            keras.Variable(rank, dtype="int32", trainable=False),
        ]
        hvd.broadcast_variables(variables, root_rank=1)
        assert [np.array(one).tolist() for one in variables] == [[1.0, 1.0], 1]
        wrong = [keras.Variable(np.zeros(2 + rank))]
        with raises(hvd.HorovodInternalError, "different variables"):
            hvd.broadcast_variables(wrong)
        small, context = hvd.Compression.bf16.compress(keras.ops.ones((3,)))
        assert keras.backend.standardize_dtype(small.dtype) == "bfloat16"
        assert keras.backend.standardize_dtype(hvd.Compression.bf16.decompress(small, context).dtype) == "float32"
        assert f"{size} ranks on 1 host" in hvd.describe()
        assert f"on {keras.backend.backend()}" in hvd.describe()


def elastic() -> None:
    """A state goes back to what was committed, and is that of rank 0 after sync."""
    with joined():
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        part = mine(make_data())
        fit(model, optimizer, part, rows=ROWS, epochs=1)
        state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        before = [np.array(one) for one in [*model.weights, *optimizer.variables]]
        keep = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        model.fit(*part, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, callbacks=keep)
        assert (state.epoch, state.batch) == (2, 0)
        state.restore()
        assert (state.epoch, state.batch) == (0, 0)
        for one, two in zip([*model.weights, *optimizer.variables], before, strict=True):
            np.testing.assert_array_equal(np.array(one), two)
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
        model.fit(*part, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, callbacks=[*keep, commit])
        weights = model.get_weights()
        model.set_weights([7 * one for one in weights])
        state.restore()
        for one, two in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, two)
        if hvd.rank():
            model.set_weights([7 * one for one in weights])
            state.epoch = 9
        state.sync()
        assert state.epoch == 2
        assert_alike(model, model)


def replaced() -> None:
    """The world has a new rank, and its first fit() has no data, as where the others were at the end of an epoch.

    Not with Adam: fit() without data makes Keras on TensorFlow count a step.
    """

    def wrap() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))

    with joined():
        data, reference = make_data(), make_model()
        part = mine(data)
        fit(reference, wrap(), part, rows=ROWS, epochs=2)
        model = make_model()
        fit(model, wrap(), part, rows=ROWS, epochs=1)
        hvd.shutdown()
        hvd.init()
        if hvd.rank() == 1:
            model = make_model()
            model.compile(wrap(), "mse")
        state = hvd.elastic.KerasState(model)
        state.sync()
        model.fit(*(array[:0] for array in part), batch_size=ROWS, epochs=1, verbose=0)
        hvd.barrier()
        model.fit(*part, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
        assert_alike(model, reference)


class _Batches(keras.utils.PyDataset):
    """Ten batches of one number each."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return np.full((1, 12), index, "float32"), np.full((1, 5), index, "float32")


def shards() -> None:
    """Nothing is lost or repeated in evaluation; in training all ranks have as many, nothing is lost by padding."""
    with joined():
        size = hvd.size()
        arrays = {"x": np.arange(10), "y": keras.ops.arange(10)}
        both: Any = (("pad", set(range(10))), ("drop", set(range(10 // size * size))))
        for uneven, expected in both:
            part = hvd.shard(arrays, uneven=uneven)
            np.testing.assert_array_equal(part["x"], keras.ops.convert_to_numpy(part["y"]))
            everyone = hvd.allgather_object(part["x"].tolist())
            assert len({len(one) for one in everyone}) == 1
            assert {each for one in everyone for each in one} == expected
            batches = hvd.shard(_Batches(), uneven=uneven)
            everyone = hvd.allgather_object([batches[at][0][0, 0] for at in range(len(batches))])
            assert len({len(one) for one in everyone}) == 1
            assert {each for one in everyone for each in one} == expected
        with raises(ValueError, "uneven is 'dorp'"):
            hvd.shard(arrays, uneven="dorp")  # type: ignore[arg-type]
        everyone = hvd.allgather_object(hvd.shard(arrays, evaluation=True)["x"].tolist())
        assert sorted(each for one in everyone for each in one) == list(range(10))
        batches = hvd.shard(_Batches(), evaluation=True)
        everyone = hvd.allgather_object([batches[at][0][0, 0] for at in range(len(batches))])
        assert sorted(each for one in everyone for each in one) == list(range(10))
        # More steps on some ranks would hang.
        model = make_model()
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), (hvd.shard(_Batches()),), rows=None)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            data = tf.data.Dataset.range(10)
            for uneven, expected in both:
                everyone = hvd.allgather_object([int(one) for one in hvd.shard(data, uneven=uneven)])
                assert len({len(one) for one in everyone}) == 1
                assert {each for one in everyone for each in one} == expected
            everyone = hvd.allgather_object([int(one) for one in hvd.shard(data, evaluation=True)])
            assert sorted(each for one in everyone for each in one) == list(range(10))
            with raises(ValueError, "assert_cardinality"):
                hvd.shard(data.filter(lambda one: one > 3))


def refused() -> None:
    """What cannot be is said at once."""
    with joined():
        wrapped, wrong = hvd.DistributedOptimizer("sgd"), cast(Any, int)
        tiny = keras.Variable(np.zeros(2), dtype="float8_e4m3fn", name="tiny")
        legacy = type("SGD", (), {"__module__": "tf_keras.src.optimizers.sgd"})()
        cases: list[tuple[Any, str]] = [
            (lambda: hvd.DistributedOptimizer(wrapped), "only once"),
            (lambda: hvd.DistributedOptimizer(legacy), "Unset TF_USE_LEGACY_KERAS"),
            (lambda: hvd.DistributedOptimizer("sgd", op=hvd.Max), "Average or hvd.Sum"),
            (
                lambda: hvd.DistributedOptimizer("sgd", op=hvd.Sum, gradient_predivide_factor=2.0),
                "needs op=hvd.Average",
            ),
            (lambda: hvd.DistributedOptimizer("sgd", backward_passes_per_step=0), "1 or more"),
            (
                lambda: hvd.DistributedOptimizer(
                    keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2
                ),
                "have the same effect",
            ),
            (lambda: hvd.DistributedOptimizer("sgd", compression=wrong), "compression="),
            (lambda: hvd.DistributedOptimizer("sgd").build([tiny]), "tiny is float8_e4m3fn"),
            (lambda: hvd.PartialDistributedOptimizer("sgd", local_layers=[3]), "Keras layers"),
            (lambda: hvd.broadcast_global_variables(0), "broadcast_model"),
            (lambda: hvd.shard([1, 2]), "takes arrays"),
            (lambda: hvd.shard((np.zeros(2), np.zeros(3))), "different lengths"),
            (lambda: hvd.broadcast(1.0, root_rank=99), "root_rank is 99"),
            (lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=3), "local_variables holds 3"),
            (lambda: hvd.callbacks.BestModelCheckpoint().on_train_begin(), "filepath is not set"),
        ]
        for call, words in cases:
            with raises((ValueError, TypeError, RuntimeError), words):
                call()
