"""FitCheck: the check during fit() that the ranks' variables are still equal."""

from __future__ import annotations

import zlib

import keras

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import global_process_set
from hvdkit.engine.replicate import ReplicaCheck
from hvdkit.keras.backends import settle
from hvdkit.keras.distributed import Distributed, sync_of
from hvdkit.keras.settings import name_variables
from hvdkit.keras.sync import GradientSync


class FitCheck:
    """Counts the steps of one fit(), and compares the trained variables as often as HVDKIT_CHECK_REPLICAS requires."""

    def __init__(self, model: keras.Model) -> None:
        sync = find_sync(model)
        ranks = global_process_set if sync is None else sync.process_set
        equal = sync is None or sync.strategy is None or sync.strategy.equal_replicas
        every = engine.runtime("fit()").config.check_replicas if ranks.included() and equal else 0
        known = (ranks if every else global_process_set).group("fit()").engine
        self._check = ReplicaCheck(known, f"fit.{known.count('fit')}", every)

    def stepped(self, callback: keras.callbacks.Callback, steps: int) -> None:
        """Count steps of the model; see ReplicaCheck.stepped."""
        self._check.stepped(lambda: _checksums(callback.model), steps)


def _checksums(model: keras.Model) -> list[tuple[str, int]]:
    settle()
    sync = find_sync(model)
    variables = model.trainable_variables
    if sync is not None:
        variables = sync.shared(variables)
    sums = [zlib.crc32(keras.ops.convert_to_numpy(variable).tobytes()) for variable in variables]
    return list(zip(name_variables(variables), sums, strict=True))


def find_sync(model: keras.Model) -> GradientSync | None:
    """Return the GradientSync of the model's optimizer; None if it is not wrapped."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return sync_of(inner) if isinstance(inner, Distributed) else None
