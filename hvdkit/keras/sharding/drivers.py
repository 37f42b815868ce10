"""What differs between the backends of Keras where the state of an optimizer is divided."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import keras

from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.arrays import ShardedArrays
from hvdkit.engine.sharding.pieces import Piece
from hvdkit.transport.buffer import Array

#: Sums a (n,) float32 array over the ranks, in place; collective.
Sum = Callable[[Array], None]


class ShardDriver(Protocol):
    """Reduces gradients to pieces, and gathers variables, inside of a compiled step as well as outside.

    tensors, variables: what is trained, in the same order. early: reduce gradients while the rest of backward runs,
    where the backend allows, so that all of them never exist together. Opened by all ranks together.
    """

    arrays: ShardedArrays

    def __init__(
        self,
        group: Group,
        tensors: Sequence[TensorSpec],
        variables: Sequence[Any],
        options: ReduceOptions,
        add: Sum,
        *,
        early: bool,
    ) -> None: ...

    def make_piece(self, piece: Piece, name: str) -> Any:
        """A variable (count,) of this name for a piece of the rank's; refresh() gives it its value."""

    def refresh(self, pieces: Sequence[Any]) -> None:
        """Give the variables of the pieces the values that the trained variables have there."""

    @property
    def sent(self) -> Collection[int]:
        """The tensors whose gradients backward has handed over for the next scatter(): there they are None."""
        return ()

    def before_backward(self) -> None:
        """The next gradients of the variables are those that scatter() is called for; not every loop says so."""

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the pieces (count,), of all ranks; None where no rank has one. Collective.

        Raises ValueError where no rank has any.
        """

    def gather(self, pieces: Sequence[Any], due: Any) -> None:
        """Give the trained variables the values of all ranks' pieces, if due; collective. due: as StrategyDriver's."""

    def close(self) -> None:
        """Free the buckets; collective."""
        self.arrays.close()

    def sum(self, numbers: Any) -> Any:
        """The sum of a (n,) float32 tensor over the ranks; collective."""


_DRIVERS = {
    "torch": "hvdkit.keras.sharding.on_torch:TorchShards",
    "jax": "hvdkit.keras.sharding.on_jax:JaxShards",
    "tensorflow": "hvdkit.keras.sharding.on_tensorflow:TensorflowShards",
}


def driver_kind() -> type[ShardDriver]:
    """The class for the backend that Keras runs on."""
    module, _, kind = _DRIVERS[keras.backend.backend()].partition(":")
    found: type[ShardDriver] = getattr(importlib.import_module(module), kind)
    return found
