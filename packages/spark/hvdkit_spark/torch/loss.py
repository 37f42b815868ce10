"""Loss and metrics of a batch, weighted by rows, and their means over all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.errors import ConfigError
from hvdkit_spark.common.training import Batch

Function = Callable[..., torch.Tensor]


class Means:
    """Means of named values over the rows of all ranks, which add the values in the same order."""

    def __init__(self) -> None:
        self._means: dict[str, hvd.metrics.Mean] = {}

    def add(self, name: str, value: torch.Tensor | float, rows: int) -> None:
        """Add the mean of a value over some rows."""
        self._means.setdefault(name, hvd.metrics.Mean()).update(value, rows)

    def compute(self) -> dict[str, float]:
        """Compute the mean of each value; collective."""
        return {name: mean.compute() for name, mean in self._means.items()}


class Loss:
    """The weighted sum of the losses of all outputs.

    losses: one loss, or one for each output.
    weights: weights of the losses; None for 1.
    metrics: metrics of each batch.
    weighted: does each row have a weight?
    """

    def __init__(
        self,
        losses: Function | Sequence[Function],
        weights: Sequence[float] | None,
        metrics: Sequence[Function] | Mapping[str, Function] | None,
        *,
        weighted: bool,
    ) -> None:
        self._losses = list(losses) if isinstance(losses, Sequence) else [losses]
        self._weights = list(weights or [1.0] * len(self._losses))
        if len(self._weights) != len(self._losses):
            raise ConfigError(f"There are {len(self._weights)} loss_weights for {len(self._losses)} losses.")
        if weighted:
            self._losses = [_by_row(each) for each in self._losses]
        self._metrics = name_metrics(metrics)

    def compute(self, model: torch.nn.Module, batch: Batch, device: torch.device, means: Means) -> torch.Tensor:
        """Compute the loss of a batch, and add it and the metrics to `means`.

        model: the module.
        batch: inputs, labels and weights.
        device: the device on which to compute.
        means: the means of this epoch.
        """
        found = model(*(torch.from_numpy(array).to(device) for array in batch.inputs))
        outputs = list(found) if isinstance(found, list | tuple) else [found]
        if not len(outputs) == len(batch.labels) == len(self._losses):
            raise ConfigError(
                f"The model returns {len(outputs)} outputs, but there are {len(batch.labels)} label_cols and "
                f"{len(self._losses)} losses. Each output needs one of both."
            )
        labels = [
            _like(torch.from_numpy(label).to(device), output)
            for label, output in zip(batch.labels, outputs, strict=True)
        ]
        losses = [loss(output, label) for loss, output, label in zip(self._losses, outputs, labels, strict=True)]
        if batch.weight is not None:
            weight = torch.from_numpy(batch.weight).to(device)
            losses = [(loss.reshape(len(weight), -1).mean(1) * weight).mean() for loss in losses]
        total: torch.Tensor = torch.stack(
            [loss * weight for loss, weight in zip(losses, self._weights, strict=True)]
        ).sum()
        rows = len(batch.inputs[0])
        means.add("loss", total.detach(), rows)
        with torch.no_grad():
            for name, metric in self._metrics.items():
                single = len(outputs) == 1
                value = metric(outputs[0], labels[0]) if single else metric(outputs, labels)
                means.add(name, value, rows)
        return total


def name_metrics(metrics: Sequence[Function] | Mapping[str, Function] | None) -> dict[str, Function]:
    """Map names to metrics; functions of a list have their own names.

    Raises ConfigError for two metrics of one name.
    """
    if not metrics:
        return {}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    named = {getattr(each, "__name__", type(each).__name__): each for each in metrics}
    if len(named) < len(metrics):
        raise ConfigError(f"Two metrics have the same name: {', '.join(named)}. Pass a dict of name to metric.")
    return named


def _like(label: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return label.reshape(output.shape) if label.numel() == output.numel() else label


def _by_row(loss: Any) -> Function:
    """Return the same loss without the mean over rows."""
    if isinstance(loss, torch.nn.Module):
        if not hasattr(loss, "reduction"):
            raise ConfigError(f"sample_weight_col needs a loss with `reduction`; {type(loss).__name__} has none.")
        loss = copy.copy(loss)
        loss.reduction = "none"
        module: Function = loss
        return module
    return lambda output, label: loss(output, label, reduction="none")
