"""Metrics over the samples of all ranks: exact for unequal shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdkit.engine.basics import rank
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Sum
from hvdkit.keras.state import sync_state
from hvdkit.keras.values import allreduce


def average_metrics(
    model: keras.Model,
    others: Mapping[str, float] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> dict[str, float]:
    """Return the metrics of the model over the samples of all ranks since the metrics were reset; a collective call.

    The metrics of Keras keep sums and counts, which are summed over the ranks, so accuracy, AUC, losses and all others
    are exact, also for ranks with unequal shards or none. A custom metric class that does not derive from
    keras.metrics.Mean or Sum is averaged with the number of samples as weight, and so are `others`.

    others: more numbers to average, by name, with the same names on all ranks. Returns the same values on every rank.
    """
    sync_state(model)
    metrics = _leaves(model)
    adding = [metric for metric in metrics if _adds_up(metric)]
    variables = [variable for metric in adding for variable in metric.variables]
    own = _numbers(model.get_metrics_result())
    mine = {**(others or {}), **own}
    names = sorted(mine)
    samples = count_samples(model)
    values = [np.array(variable.numpy(), np.float64).reshape(-1) for variable in variables]
    weighted = np.array([mine[one] * samples if samples else 0.0 for one in names] + [samples], np.float64)
    summed = allreduce(np.concatenate([*values, weighted]), name=name, op=Sum, process_set=process_set)
    means = summed[len(summed) - len(weighted) :]
    result = {
        one: float(total / means[-1]) if means[-1] else float("nan") for one, total in zip(names, means, strict=False)
    }
    with _Put(variables, summed):
        exact = _numbers(model.get_metrics_result())
    inexact = {metric.name for metric in metrics if not _adds_up(metric)}
    result.update({one: value for one, value in exact.items() if one not in inexact})
    return result


def evaluate(model: keras.Model, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Evaluate the model on the shards of all ranks; returns the metrics by name, the same exact values on every rank.

    args, kwargs: as for model.evaluate(), with the shard of this rank. Only rank 0 shows a progress bar.
    """
    if rank() != 0:
        kwargs["verbose"] = 0
    model.evaluate(*args, **{**kwargs, "return_dict": True})
    return average_metrics(model)


class _Put:
    """Context in which variables have other values."""

    def __init__(self, variables: list[Any], numbers: Any) -> None:
        self._variables, self._numbers = variables, numbers

    def __enter__(self) -> None:
        self._kept = [np.array(variable.numpy()) for variable in self._variables]
        at = 0
        for variable, kept in zip(self._variables, self._kept, strict=True):
            variable.assign(self._numbers[at : at + kept.size].reshape(kept.shape).astype(kept.dtype))
            at += kept.size

    def __exit__(self, *error: object) -> None:
        for variable, kept in zip(self._variables, self._kept, strict=True):
            variable.assign(kept)


def _leaves(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the model's metrics, those of compile() singly."""
    found: list[keras.metrics.Metric] = []
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        found += list(inner) if inner is not None else [metric]
    return found


def _adds_up(metric: keras.metrics.Metric) -> bool:
    """Return whether the metric's state is a sum over samples, as with all of Keras's own metrics."""
    own = type(metric).__module__.partition(".")[0] == "keras"
    return own or isinstance(metric, (keras.metrics.Mean, keras.metrics.Sum))


def count_samples(model: keras.Model) -> float:
    """Return this rank's number of samples since the metrics were reset, after sync_state(); 1 without a loss."""
    tracker = getattr(model, "_loss_tracker", None)
    return float(tracker.count.numpy()) if tracker is not None else 1.0


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            flat.update(_numbers(value))
        elif np.ndim(number := keras.ops.convert_to_numpy(value)) == 0:
            flat[name] = float(number)
    return flat
