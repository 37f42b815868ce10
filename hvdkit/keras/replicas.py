"""The check that the ranks' variables are still equal, for fit()."""

from __future__ import annotations

import zlib

import keras

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import global_process_set
from hvdkit.engine.replicate import ReplicaCheck
from hvdkit.keras.backends import settle
from hvdkit.keras.distributed import Distributed, reduction_of
from hvdkit.keras.settings import name_variables
from hvdkit.keras.sync import Reduction


class FitCheck:
    """Counts the steps of one fit(), and compares the trained variables when HVDKIT_CHECK_REPLICAS says so."""

    def __init__(self, model: keras.Model) -> None:
        reduction = find_reduction(model)
        ranks = global_process_set if reduction is None else reduction.process_set
        every = engine.runtime("fit()").config.check_replicas if ranks.included() else 0
        known = (ranks if every else global_process_set).group("fit()").engine
        self._check = ReplicaCheck(known, f"fit.{known.count('fit')}", every)

    def stepped(self, callback: keras.callbacks.Callback, steps: int) -> None:
        """The model has taken so many steps; see ReplicaCheck.stepped."""
        self._check.stepped(lambda: _checksums(callback.model), steps)


def _checksums(model: keras.Model) -> list[tuple[str, int]]:
    settle()
    reduction = find_reduction(model)
    variables = model.trainable_variables
    if reduction is not None:
        variables = reduction.shared(variables)
    sums = [zlib.crc32(keras.ops.convert_to_numpy(one).tobytes()) for one in variables]
    return list(zip(name_variables(variables), sums, strict=True))


def find_reduction(model: keras.Model) -> Reduction | None:
    """How the gradients of the model's optimizer are reduced; None if it is not wrapped."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return reduction_of(inner) if isinstance(inner, Distributed) else None
