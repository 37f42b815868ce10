"""The training loop of TorchEstimator on a rank."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit_spark.common.batches import Batches
from hvdkit_spark.common.checkpoints import History
from hvdkit_spark.common.training import Trained, Training
from hvdkit_spark.torch.loss import Loss, Means


def train(training: Training, objects: bytes) -> Trained | None:
    """Train on all ranks; returns the model on rank 0. objects: the pickled parameters of the estimator."""
    hvd.init()
    given = pickle.loads(objects)
    device = hvd.local_device()
    torch.manual_seed(training.seed + hvd.rank())
    model: torch.nn.Module = given["model"].to(device)
    optimizer: torch.optim.Optimizer = given["optimizer"]
    history: History = {}
    checkpoint = training.resume(hvd.rank(), hvd.broadcast_object)
    if checkpoint is not None:
        history = checkpoint.history
        state = torch.load(io.BytesIO(checkpoint.state), map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    passes = given["backward_passes_per_step"]
    compression = given["gradient_compression"]
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none if compression is None else compression,
        backward_passes_per_step=passes,
    )
    loss = Loss(given["loss"], given["loss_weights"], given["metrics"], weighted=bool(training.weight))
    rows = training.open_train(hvd.rank(), hvd.size())
    tests = training.open_validation(hvd.rank(), hvd.size())
    steps = training.train_steps or len(rows)

    def pack() -> bytes:
        return _save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    for epoch in range(checkpoint.epochs if checkpoint is not None else 0, training.epochs):
        model.train()
        means = Means()
        for number, batch in enumerate(rows.epoch(epoch, steps), 1):
            value = loss.compute(model, training.split(batch), device, means)
            value.backward()
            if number % passes == 0 or number == steps:
                optimizer.step()
                optimizer.zero_grad()
        found = means.compute()
        if tests is not None:
            found |= {f"val_{name}": value for name, value in _evaluate(model, loss, training, tests, device).items()}
        for name, each in found.items():
            history.setdefault(name, []).append(each)
        if hvd.rank() == 0:
            training.report(epoch + 1, found)
            training.save(pack, history, epoch + 1)
    if hvd.rank() != 0:
        return None
    return Trained(_save(model.state_dict()), history, _measure_outputs(model, training, rows, device))


def _evaluate(
    model: torch.nn.Module, loss: Loss, training: Training, tests: Batches, device: torch.device
) -> dict[str, float]:
    """Compute the means over the validation rows of all ranks; collective."""
    model.eval()
    means = Means()
    with torch.no_grad():
        for batch in tests.epoch(0, training.validation_steps):
            loss.compute(model, training.split(batch), device, means)
    return means.compute()


def _measure_outputs(model: torch.nn.Module, training: Training, rows: Batches, device: torch.device) -> list[int]:
    """Return for each output how many numbers it has in a row."""
    model.eval()
    inputs = training.split(next(rows.epoch(0, 1))).inputs
    with torch.no_grad():
        outputs = model(*(torch.from_numpy(array).to(device) for array in inputs))
    return [each[0].numel() for each in (outputs if isinstance(outputs, list | tuple) else [outputs])]


def _save(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
