"""ShardSync: the ranks of one sharded optimizer, the assignment of slices, and their collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.engine.named.operation import Action
from hvdkit.engine.named.submit import collective_step, do, reduce_options
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.reduce_op import Sum
from hvdkit.errors import HorovodInternalError
from hvdkit.keras.backends import settle
from hvdkit.keras.settings import OptimizerSettings, name_variables
from hvdkit.keras.sharding.drivers import ShardDriver, TrainedVariables, driver_kind
from hvdkit.keras.sync import GradientSync
from hvdkit.transport.buffer import Array, Buffer


class ShardSync(GradientSync):
    """The GradientSync of a sharded optimizer, which has no strategy.

    passes_factor: multiplied with accumulated gradients. early: see TrainedVariables.
    """

    def __init__(self, settings: OptimizerSettings, *, passes_factor: float, early: bool) -> None:
        self.passes_factor, self._early = passes_factor, early
        self._shards: ShardDriver | None = None
        self._closed = False
        self._name = ""
        super().__init__(settings, local_layers=(), scale_local=True, passes_factor=1.0)

    def enter(self) -> None:
        """See GradientSync.enter. The old division remains until open(), so that a step before raises an error."""

    @property
    def is_open(self) -> bool:
        """Return whether the state is divided among the present ranks."""
        return self._shards is not None and not self._closed

    @property
    def is_traced_with_ranks(self) -> bool:
        """See GradientSync. Compiled steps contain the variables of this rank's slices."""
        return True

    def open(self, variables: Sequence[Any]) -> ShardDriver:
        """Agree on the variables, and divide them; collective. Afterwards `driver` is available.

        Raises TypeError for a variable that cannot be trained, PlanMismatchError if the variables differ between ranks.
        """
        names = name_variables(variables)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"DistributedOptimizer(): shard= cannot train {variable.path}, which is overwritten with its "
                    f"gradient, as in training with float8. Leave out shard."
                )
        tensors = [
            TensorSpec(name, int(np.prod(variable.shape)), _dtype(variable), shape=tuple(variable.shape))
            for name, variable in zip(names, variables, strict=True)
        ]
        settings = self._settings
        # Counted in this world: a process may have wrapped more optimizers than others.
        self._name = f"optimizer {settings.group.engine.count('norms')}"
        self._shards = driver_kind()(
            TrainedVariables(settings.group, tensors, list(variables), settings.options, self._add, self._early)
        )
        self._closed = False
        return self._shards

    @property
    def driver(self) -> ShardDriver:
        """The open driver. Raises HorovodInternalError after close()."""
        return self._open_driver()

    def _open_driver(self) -> ShardDriver:
        if self._shards is None or self._closed:
            raise HorovodInternalError(
                "The state of this optimizer is divided among the ranks of before shutdown(). After another init() "
                "call sync() of an hvd.elastic.KerasState that holds a commit, or make a new model and optimizer, and "
                "load a checkpoint."
            )
        return self._shards

    def _add(self, numbers: Array) -> None:
        options = reduce_options(["float32"], Sum, 1.0, 1.0, "DistributedOptimizer()")
        buffer = Buffer(numbers.reshape(-1), "float32")
        name = f"norms of {self._name}"
        do(self._settings.group, "allreduce", name, [("float32", numbers.shape)], [buffer], options)

    def together(self, kind: str, action: Action) -> Any:
        """Run an action on all ranks of this optimizer; collective. kind: see collective_step().

        Raises HorovodInternalError if the state is not divided among the present ranks.
        """
        self._open_driver()
        return collective_step(self._settings.group.engine, kind, action, name=self._name)

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._shards is not None and not self._closed:
            self._closed = True
            settle()
            self._shards.close()


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))
