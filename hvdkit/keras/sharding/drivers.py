"""ShardDriver, the interface to a backend of Keras for sharded optimizer state."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.arrays import ShardedArrays
from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.transport.buffer import Array

#: Sums a (n,) float32 array over the ranks, in place; collective.
Sum = Callable[[Array], None]


@dataclass(frozen=True)
class TrainedVariables:
    """The variables that one optimizer trains, and how their gradients are reduced.

    group: the ranks that train together.
    tensors: a description of each variable, in the same order on all ranks.
    variables: of Keras, in the order of `tensors`.
    options: the reduction of gradients, without codings.
    add: sums numbers over the ranks.
    early: reduce gradients while the rest of backward runs, if the backend allows, so that they never exist all at
        once.
    """

    group: Group
    tensors: Sequence[TensorSpec]
    variables: Sequence[Any]
    options: ReduceOptions
    add: Sum
    early: bool

    def open(self, *, compute_threads: int) -> ShardedArrays:
        """Divide the variables among the ranks; collective. compute_threads: see ShardedArrays."""
        return ShardedArrays(self.group, self.tensors, self.options, compute_threads=compute_threads)


class ShardDriver(Protocol):
    """Reduces gradients to slices, and gathers variables, inside of a compiled step as well as outside.

    All ranks construct it together.
    """

    arrays: ShardedArrays

    def __init__(self, trained: TrainedVariables) -> None: ...

    def make_piece(self, piece: TensorRange, name: str) -> Any:
        """Make a variable (count,) of this name for one of the rank's slices; refresh() sets its value."""

    def refresh(self, pieces: Sequence[Any]) -> None:
        """Copy the trained variables' values to the variables of the slices."""

    @property
    def sent(self) -> Collection[int]:
        """Tensors whose gradients backward has passed on for the next scatter(), which gets None for them."""
        return ()

    def before_backward(self) -> None:
        """Prepare for the gradients of the next scatter(); not every training loop calls this."""

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of the slices (count,); None if no rank has a gradient. Collective.

        Raises ValueError if no rank has any gradient.
        """

    def gather(self, pieces: Sequence[Any], due: Any) -> None:
        """Set the trained variables to all ranks' slices, if due; collective. due: see StrategyDriver."""

    def close(self) -> None:
        """Free the buckets; collective."""
        self.arrays.close()

    def sum(self, numbers: Any) -> Any:
        """Return the sum of a (n,) float32 tensor over the ranks; collective."""


_DRIVERS = {
    "torch": "hvdkit.keras.sharding.on_torch:TorchShards",
    "jax": "hvdkit.keras.sharding.on_jax:JaxShards",
    "tensorflow": "hvdkit.keras.sharding.on_tensorflow:TensorflowShards",
}


def driver_kind() -> type[ShardDriver]:
    """Return the driver's class for Keras's backend."""
    module, _, kind = _DRIVERS[keras.backend.backend()].partition(":")
    found: type[ShardDriver] = getattr(importlib.import_module(module), kind)
    return found
