"""Weigh a rank's rows for the gradient, and leave that weight out of the training loss and of the weighted metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

_OWN, _MEAN, _PART = "hvdkit_own", "hvdkit_mean", "hvdkit_part"


def pack(own: Any, mean: Any, part: Any) -> dict[str, Any]:
    """Return what takes the place of the sample weights of a batch until adapt() takes it apart.

    own: the weights that one process would use, times part.
    mean: for each row, the factor that makes the average over the ranks the mean over the whole batch.
    part: for each row, 1, or 1 / size if all ranks compute the same rows.
    """
    return {_OWN: own, _MEAN: mean, _PART: part}


@contextmanager
def adapt(model: Any) -> Iterator[None]:
    """Context in which the train_step() of Keras accepts packed weights.

    The loss, whose gradient is averaged over the ranks, is weighed with all factors. Its tracker divides by `mean`:
    sums over ranks of the tracker's total and count are then those of one process, with the penalties in the loss too.
    """
    tracker = getattr(model, "_loss_tracker", None)
    losing, measuring = model.compute_loss, model.compute_metrics
    packed = [False]
    held: list[tuple[Any, Any]] = []

    def compute_loss(x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **more: Any) -> Any:
        packed[0] = _is_packed(sample_weight)
        if packed[0]:
            factor = sample_weight[_MEAN][0] / sample_weight[_PART][0]
            sample_weight = keras.tree.map_structure(lambda one: one * factor, sample_weight[_OWN])
        return losing(x, y, y_pred, sample_weight, **more)

    def compute_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if _is_packed(sample_weight):
            for loss, rows in held:
                mean, part = sample_weight[_MEAN][0], sample_weight[_PART][0]
                updating(loss / keras.ops.cast(mean, loss.dtype), sample_weight=keras.ops.cast(rows, part.dtype) * part)
            sample_weight = sample_weight[_OWN]
        held.clear()
        packed[0] = False
        return measuring(x, y, y_pred, sample_weight)

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        """Wait for compute_metrics(), which train_step() calls next and which knows the weights."""
        if not packed[0]:
            return updating(values, sample_weight=sample_weight)
        held.append((values, sample_weight))
        return None

    if tracker is None:
        yield
        return
    updating = tracker.update_state
    places = [(model, compute_loss), (model, compute_metrics), (tracker, update_state)]
    for owner, function in places:
        owner.__dict__[function.__name__] = function
    try:
        yield
    finally:
        for owner, function in places:
            del owner.__dict__[function.__name__]


def _is_packed(weights: Any) -> bool:
    return isinstance(weights, dict) and set(weights) == {_OWN, _MEAN, _PART}
