"""Bodies for ranks of unequal speed that train on an hvd.BalancedDataset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras_training import assert_alike, joined, make_model, raises
from numpy.typing import NDArray

import hvdkit.keras as hvd
from hvdkit.training.sharding import plan_order

ROWS, BATCH = 50, 12  # the last batch of an epoch has 2 rows, fewer than there are ranks


class Paced(hvd.BalancedDataset):
    """Rank 2 needs three times as long for a row in the first 10 steps; time is made up."""

    def reduced(self, caller: Any, seconds: Any) -> None:
        rows, _ = self._parts.get(self._steps, (0, 0))
        row_s = 3.0 if hvd.rank() == 2 and self._steps < 10 else 1.0
        super().reduced(caller, lambda: rows * row_s)


def _data() -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.RandomState(0)
    return random.randn(ROWS, 12).astype("float32"), random.randn(ROWS, 5).astype("float32")


def _optimizer() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0)


def _train_alone(model: Any, seed: int, epochs: range, *, whole: bool) -> list[float]:
    """One process with the whole batch; the mean loss of each epoch."""
    x, y = _data()
    losses = []
    for epoch in epochs:
        order = plan_order(ROWS, seed=seed, epoch=epoch)
        batches = [order[at : at + BATCH] for at in range(0, ROWS, BATCH)][: ROWS // BATCH if whole else None]
        of_batches = []
        for rows in batches:
            model.reset_metrics()
            of_batches.append(float(model.train_on_batch(x[rows], y[rows], return_dict=True)["loss"]))
        losses.append(float(np.mean(of_batches)))
    return losses


def as_one_process() -> list[tuple[int, ...]]:
    """fit() as one process would; what a slow rank gets, and gets when it has recovered."""
    with joined():
        x, y = _data()
        alone, model = make_model(), make_model()
        alone.compile(_optimizer(), "mse")
        model.compile(hvd.DistributedOptimizer(_optimizer()), "mse")
        if hvd.rank() == 0:
            model.evaluate(x[:2], y[:2], verbose=0)  # so that fit() does not ask for a batch to build from
        data = Paced((x, y), BATCH, model.optimizer, every=2)
        plans = []
        for epochs in (2, 1):
            model.fit(data, epochs=epochs, verbose=0)
            plans.append(data.plan)
        _train_alone(alone, 0, range(3), whole=False)
        assert_alike(model, alone, 1e-6)
        # Another dataset, whose batches all have the whole size; metrics are those of one process.
        data = hvd.BalancedDataset((x, y), BATCH, model.optimizer, seed=1, drop_last=True, speeds=[3, 2, 1])
        assert len(data) == ROWS // BATCH and data.plan == (6, 4, 2)
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
        np.testing.assert_allclose(history["loss"], _train_alone(alone, 1, range(2), whole=True), rtol=1e-5)
        assert_alike(model, alone, 2e-6)
        _train_alone_on_others(model, alone)
        return plans


def _train_alone_on_others(model: Any, alone: Any) -> None:
    """Batches of other data are not weighted."""
    x, y = _data()
    per_rank = BATCH // hvd.size()
    mine = slice(per_rank * hvd.rank(), per_rank * (hvd.rank() + 1))
    model.fit(x[mine], y[mine], batch_size=per_rank, verbose=0, shuffle=False)
    alone.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0, shuffle=False)
    assert_alike(model, alone, 2e-6)


def weights_anew() -> None:
    """A backward pass that was cut short says nothing of the weight in the next one."""
    import torch

    from hvdkit.keras.sync_torch import _TensorHook

    weights = iter([0.5, 2.0])
    clock: Any = SimpleNamespace(gradient=lambda gradient: None)
    hook: Any = SimpleNamespace(begin_step=lambda: next(weights))
    tensors = _TensorHook(hook, clock)
    assert [float(tensors.gradient(torch.tensor(1.0))) for _ in range(2)] == [0.5, 2.0]  # type: ignore[arg-type]


def evaluates_between_epochs() -> None:
    """An evaluation on the data that one process trains on leaves the orders of the epochs as they are."""
    with joined():
        alone, model = make_model(), make_model()
        alone.compile(_optimizer(), "mse")
        model.compile(hvd.DistributedOptimizer(_optimizer()), "mse")
        data = hvd.BalancedDataset(_data(), BATCH, model.optimizer)
        for epochs in (2, 1):
            model.fit(data, epochs=epochs, verbose=0)
            model.evaluate(data, verbose=0)
            model.evaluate(data, verbose=0)
        assert data.epoch == 3
        _train_alone(alone, 0, range(3), whole=False)
        assert_alike(model, alone, 1e-6)


def misuse() -> None:
    """Errors that say what to do."""
    with joined():
        data, size = _data(), hvd.size()

        def wrap(**arguments: Any) -> Any:
            return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments)

        cases: list[tuple[type[Exception], str, int, Any, dict[str, Any]]] = [
            (TypeError, "no hvd.DistributedOptimizer", BATCH, keras.optimizers.SGD(0.1), {}),
            (ValueError, "op other than", BATCH, wrap(op=hvd.Sum), {}),
            (ValueError, "gradient_accumulation_steps=2", BATCH, wrap(backward_passes_per_step=2), {}),
            (ValueError, "has shard", BATCH, wrap(shard="optimizer"), {}),
            (ValueError, "strategy of its own", BATCH, hvd.LocalSGD(keras.optimizers.SGD(0.1)), {}),
            (ValueError, f"at least {size}", size - 1, wrap(), {}),
            (ValueError, "one for each rank", BATCH, wrap(), {"speeds": [1.0] * (size + 1)}),
            (ValueError, "every is 0", BATCH, wrap(), {"every": 0}),
            (ValueError, "grain is 0", BATCH, wrap(), {"grain": 0}),
            (ValueError, "no batch of 99", 99, wrap(), {"drop_last": True}),
        ]
        for error, words, batch, optimizer, options in cases:
            with raises(error, words):
                hvd.BalancedDataset(data, batch, optimizer, **options)
        alone = wrap(process_set=hvd.add_process_set([0]))
        own = hvd.BalancedDataset(data, BATCH, alone)  # which each rank has for itself
        on_jax = keras.backend.backend() == "jax"  # where a loop of the script's own changes no variables
        for turn in range(2):
            assert len(list(own)) == len(own)
            assert own.epoch == (turn if on_jax else 0), "only JAX takes it for training"
        own.set_epoch(7)
        next(iter(own))
        assert own.epoch == 7
        own.workers, own.use_multiprocessing = 1, False
        with raises(ValueError, "workers = 2"):
            own.workers = 2
        with raises(ValueError, "use_multiprocessing"):
            own.use_multiprocessing = True
        with raises(ValueError, "different lengths"):
            hvd.BalancedDataset((data[0], data[1][1:]), BATCH, wrap())
        model = make_model()
        model.compile(wrap(), "mse")
        old = hvd.BalancedDataset(data, BATCH, model.optimizer)
        new = hvd.BalancedDataset(data, BATCH, model.optimizer, every=2 + hvd.rank())
        with raises(Exception, "a newer BalancedDataset"):
            next(iter(old))
        with raises(Exception, "every"):
            model.fit(new, verbose=0)
        kept, model = wrap(), make_model()
        model.compile(wrap(), "mse")
        with raises(ValueError, "another optimizer than its own has reduced gradients"):
            model.fit(hvd.BalancedDataset(data, BATCH, kept), verbose=0)
