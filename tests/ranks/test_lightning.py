"""Lightning's Trainer with strategy="hvdkit": as one process with whole batches; its logger averages over ranks."""

from __future__ import annotations

import csv
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader
from torchrun_scripts.problem import BATCH, RATE, flatten, make_data, make_model

import hvdkit.torch as hvd
from hvdkit.errors import ConfigError

pytestmark = pytest.mark.ranks


def train_alone(passes: int = 1, clip: float = 0.0, epochs: int = 1) -> list[float]:
    """The weights of one process whose batches are `passes` times as large."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    inputs, targets = make_data().tensors
    for _ in range(epochs):
        for first in range(0, len(inputs), passes * BATCH):
            batch = slice(first, first + passes * BATCH)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return flatten(list(model.parameters()))


def fit(
    trainer_options: dict[str, Any], strategy_options: dict[str, Any], places: dict[str, str], checkpoint: str = ""
) -> dict[str, Any]:
    """Fit with Lightning on this rank."""
    import lightning
    import torch.distributed as dist

    import hvdkit.lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            if hvd.rank():
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.add_(1)  # rank 0's are to be everybody's

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            self.log("loss", loss, on_step=True, on_epoch=False)
            self.log("rank", float(hvd.rank()), on_step=True, on_epoch=False)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("sum", float(hvd.rank() + 1), sync_dist=True, reduce_fx="sum")
            self.log("mean", float(hvd.rank()), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    torch.set_num_threads(1)
    hvd.init()
    data, size = make_data(), hvd.size()
    # Batch k of rank r is a part of batch k of one process.
    order = [row for rank in range(size) for first in range(0, len(data), BATCH) for row in _part(first, rank, size)]
    mine = order[hvd.rank() * len(data) // size : (hvd.rank() + 1) * len(data) // size]
    loader = DataLoader(torch.utils.data.Subset(data, mine), BATCH // size)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=hvdkit.lightning.HvdkitStrategy(**strategy_options) if strategy_options else "hvdkit",
        logger=hvdkit.lightning.HvdkitLogger(**places, every=2) if places else False,  # type: ignore[arg-type]
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **trainer_options,
    )
    module = Regression()
    try:
        trainer.fit(module, loader, DataLoader(data, len(data)), ckpt_path=checkpoint or None)
        if checkpoint == "" and places.get("csv", "").endswith("saved.csv"):
            trainer.save_checkpoint(str(Path(places["csv"]).with_suffix(".ckpt")))
        values = torch.tensor([hvd.rank()])
        return {
            "weights": flatten(list(module.parameters())),
            "size": trainer.world_size,
            "zero": trainer.is_global_zero,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "gathered": trainer.strategy.all_gather(values).tolist(),
            "backend": dist.get_backend(),
            "sampler": trainer.distributed_sampler_kwargs,
            "stop": [trainer.strategy.reduce_boolean_decision(hvd.rank() == 0, all=whole) for whole in (True, False)],
        }
    finally:
        dist.destroy_process_group()
        hvd.shutdown()


def _part(first: int, rank: int, size: int) -> range:
    return range(first + rank * BATCH // size, first + (rank + 1) * BATCH // size)


def check_weights(ranks: list[dict[str, Any]], expected: list[float]) -> None:
    for each in ranks:
        assert each["weights"] == ranks[0]["weights"]
        assert each["weights"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_trainer_with_one_argument_trains_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    ranks = run_ranks(2, fit, {"max_epochs": 1, "gradient_clip_val": 0.5}, {}, {"csv": str(tmp_path / "run.csv")})
    check_weights(ranks, train_alone(clip=0.5))
    for rank, each in enumerate(ranks):
        assert (each["size"], each["zero"], each["backend"]) == (2, rank == 0, "hvdkit")
        assert each["metrics"]["sum"] == 3 and each["metrics"]["mean"] == 0.5
        assert each["gathered"] == [[0], [1]] and each["stop"] == [False, True]
        assert each["sampler"] == {"num_replicas": 2, "rank": rank}
    with (tmp_path / "run.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["value"]) for line in lines if line["key"] == "rank"] == [0.5] * 8
    assert {"loss", "epoch", "sum", "mean", "hvdkit/step_ms", "hvdkit/exposed_ms"} <= {line["key"] for line in lines}
    assert "hvdkit/samples_per_s" not in {line["key"] for line in lines}  # Lightning does not tell samples


def _log_in_two_parts(lines: str) -> None:
    """What Lightning calls of a logger in fit() and then in test(), with an MLflow that writes its runs to `lines`."""
    import fake_mlflow

    import hvdkit.lightning

    os.environ["FAKE_MLFLOW"] = lines
    fake_mlflow.install()
    hvd.init()
    try:
        logger = hvdkit.lightning.HvdkitLogger(mlflow="uri")
        for step in range(2):
            logger.log_metrics({"loss": 1.0}, step)
            logger.finalize("success")
    finally:
        hvd.shutdown()
        del sys.modules["mlflow"], os.environ["FAKE_MLFLOW"]


def test_the_folder_of_checkpoints_beside_a_logger_is_no_package() -> None:
    pytest.importorskip("lightning")
    from hvdkit.lightning import HvdkitLogger

    assert importlib.util.find_spec(HvdkitLogger().name) is None  # in the clone "hvdkit" would be the sources


def test_a_logger_is_one_run_also_for_a_test_after_a_fit(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run_ranks(2, _log_in_two_parts, str(tmp_path / "runs"))
    events = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    assert [what for what, _ in events] == ["created", "FINISHED", "continued", "RUNNING", "FINISHED"]
    assert len({run for _, run in events}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_options", "strategy_options", "passes"),
    [
        ({"max_epochs": 1, "accumulate_grad_batches": 2}, {}, 2),
        ({"max_epochs": 1}, {"shard": "optimizer"}, 1),
    ],
    ids=["accumulation", "shard"],
)
def test_accumulation_and_sharded_optimizers(
    trainer_options: dict[str, Any], strategy_options: dict[str, Any], passes: int
) -> None:
    pytest.importorskip("lightning")
    check_weights(run_ranks(2, fit, trainer_options, strategy_options, {}), train_alone(passes))


@pytest.mark.slow
def test_a_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    place = {"csv": str(tmp_path / "saved.csv")}
    run_ranks(2, fit, {"max_epochs": 1}, {}, place)
    ranks = run_ranks(2, fit, {"max_epochs": 2}, {}, place, str(tmp_path / "saved.ckpt"))
    check_weights(ranks, train_alone(epochs=2))


def _fit_twice() -> list[int]:
    """How many reductions the optimizer of each of two fits of one module has done."""
    import lightning
    import torch.distributed as dist

    import hvdkit.lightning

    class Small(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    torch.set_num_threads(1)
    hvd.init()
    module, trainers = Small(), []
    try:
        for _ in range(2):
            trainer = lightning.Trainer(
                accelerator="cpu",
                strategy=hvdkit.lightning.HvdkitStrategy(),
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                max_epochs=1,
            )
            trainer.fit(module, DataLoader(make_data(), BATCH))
            trainers.append(trainer)
        optimizers: list[Any] = [trainer.optimizers[0] for trainer in trainers]
        return [optimizer.reduction_statistics().generations for optimizer in optimizers]
    finally:
        hvd.shutdown()
        assert not dist.is_initialized()  # another world may have other ranks


def _stop_early(how: str) -> tuple[int, int]:
    """Epochs and steps of a fit that the last rank alone has a reason to end."""
    import lightning
    import torch.distributed as dist

    import hvdkit.lightning

    class Small(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch[0]).square().mean()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if how == "in a hook":
                stop = hvd.rank() == hvd.size() - 1 and self.global_step == 3
                self.trainer.should_stop |= self.trainer.strategy.reduce_boolean_decision(stop, all=False)

        def on_train_epoch_end(self) -> None:
            worse = hvd.rank() == hvd.size() - 1
            self.log("seen", float(self.current_epoch) if worse else -float(self.current_epoch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    torch.set_num_threads(1)
    hvd.init()
    stopping = lightning.pytorch.callbacks.EarlyStopping("seen", patience=1, check_on_train_epoch_end=True)
    try:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy=hvdkit.lightning.HvdkitStrategy(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=4,
            callbacks=[stopping] if how == "EarlyStopping" else [],
        )
        trainer.fit(Small(), DataLoader(make_data(), BATCH))
        return trainer.current_epoch, trainer.global_step
    finally:
        dist.destroy_process_group()
        hvd.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["EarlyStopping", "in a hook"])
def test_all_ranks_stop_together(how: str) -> None:
    pytest.importorskip("lightning")
    first, *others = run_ranks(3, _stop_early, how)
    assert others == [first] * 2
    assert first[0] == 2 if how == "EarlyStopping" else first == (1, 3)


@pytest.mark.slow
def test_the_optimizer_of_an_earlier_fit_leaves_the_gradients_to_the_next_one() -> None:
    pytest.importorskip("lightning")
    for first, second in run_ranks(2, _fit_twice):
        assert first == second > 0


def _refused() -> list[str]:
    from hvdkit.lightning import HvdkitStrategy

    errors = []
    hvd.init()
    strategy = HvdkitStrategy()
    wrong_calls: list[Callable[[], object]] = [
        lambda: strategy.reduce(torch.ones(1), reduce_op="median"),
        lambda: strategy.reduce(torch.ones(1), group=object()),
    ]
    for wrong in wrong_calls:
        with pytest.raises(ConfigError) as seen:
            wrong()
        errors.append(str(seen.value))
    hvd.shutdown()
    return errors


def test_what_the_strategy_lacks_is_refused() -> None:
    pytest.importorskip("lightning")
    for errors in run_ranks(2, _refused):
        assert "has no reduction 'median'. Use one of mean" in errors[0] and "hvd.allreduce(process_set=)" in errors[1]
