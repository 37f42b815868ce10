"""The pieces that one optimizer trains, and its state: made whole from all ranks' pieces, and cut again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdkit.engine.sharding.pieces import Piece
from hvdkit.keras.backends import settle
from hvdkit.keras.sharding.layout import Entry, SlotLayout
from hvdkit.keras.sharding.sync import ShardSync
from hvdkit.transport.buffer import STORAGE, Array

#: Set on variables of which each rank has other elements.
IS_PIECE = "hvdkit_is_piece"


class Parts:
    """What this rank trains of some variables.

    pieces: a variable for each piece, and a last one, of one element, that is nobody's: Keras does not count a step
    without gradients. layout: filled while the optimizer is built on them. reduced: the variables that gradients belong
    to which are of pieces already; None where they are whole.
    """

    def __init__(self, sync: ShardSync, variables: Sequence[Any]) -> None:
        self.sync, self.variables, self.layout = sync, list(variables), SlotLayout()
        self.driver = sync.open(self.variables)
        self.index_of = {id(variable): index for index, variable in enumerate(self.variables)}
        self._tensor_of: dict[int, int] = {}
        own = [self.driver.make_piece(piece, self.variables[piece.tensor].name) for piece in self.placed]
        for piece, variable in zip(self.placed, own, strict=True):
            variable._path = self.variables[piece.tensor].path
            self._tensor_of[id(variable)] = piece.tensor
        self.pieces = [*own, keras.Variable(np.zeros(1), dtype=self.variables[0].dtype, trainable=False)]
        self.window: Sequence[Any] = ()  # the pieces whose gradients are being clipped
        self.reduced: Sequence[Any] | None = None
        self._kept: dict[int, Array] | None = None  # the slots of all pieces, by number in the plain optimizer
        self._kept_at = -1

    @property
    def placed(self) -> Sequence[Piece]:
        """Where this rank's pieces are."""
        return self.driver.arrays.pieces

    def tensors_of(self, pieces: Sequence[Any]) -> list[int]:
        """Of which variable each is a piece; -1 for none."""
        return [self._tensor_of.get(id(piece), -1) for piece in pieces]

    @contextmanager
    def reduced_of(self, variables: Sequence[Any]) -> Iterator[None]:
        """Within, gradients are of the pieces. variables: that they belong to."""
        self.reduced = variables
        try:
            yield
        finally:
            self.reduced = None

    def _entries(self, variables: Sequence[Any]) -> list[Entry]:
        return list(self.layout.entries(variables, len(self.variables)))

    def gather(self, variables: Sequence[Any], steps: int, *, keep: bool) -> None:
        """Make the state whole; collective. variables: the optimizer's. keep: does this rank need it?"""
        settle()
        driver, count = self.sync.driver, len(self.placed)
        slots: dict[int, list[Array]] = {}
        for slot in self.layout.slots():
            own = [_storage(keras.ops.convert_to_numpy(one), one.dtype) for one in slot[:count]]
            wholes = [np.empty(_count(one), STORAGE[_dtype(one)]) for one in self.variables] if keep else None
            driver.arrays.gather(own, wholes)
            if wholes is not None:
                slots[id(slot)] = wholes
        self._kept = None
        if keep:
            self._kept = {
                number: slots[id(entry.slot)][entry.tensor]
                for number, entry in enumerate(self._entries(variables))
                if entry.tensor >= 0
            }
            self._kept_at = steps

    def release(self) -> None:
        """Let go of the whole state."""
        self._kept = None

    def save(self, variables: Sequence[Any], steps: int, store: Any) -> None:
        """Write what the plain optimizer would; not collective. steps: that have been taken.

        Raises RuntimeError where the state has not been made whole since the last step.
        """
        if self._kept is None or self._kept_at != steps:
            raise RuntimeError(
                "The state of this optimizer is divided among the ranks, and cannot be saved by one rank alone. Call "
                "optimizer.gather_state() on all ranks immediately before, or save with hvd.checkpoint, which does so, "
                "or leave the optimizer out: model.save(path, include_optimizer=False)."
            )
        for number, entry in enumerate(self._entries(variables)):
            if entry.tensor < 0:
                store[str(number)] = keras.ops.convert_to_numpy(entry.variable).copy()
            else:
                store[str(number)] = self._shaped(number, entry)

    def _shaped(self, number: int, entry: Entry) -> Array:
        assert self._kept is not None
        whole = self.variables[entry.tensor]
        array = self._kept[number]
        return array.view(_numpy_dtype(whole)).reshape(tuple(whole.shape))

    def load(self, variables: Sequence[Any], store: Mapping[str, Any]) -> None:
        """Take over what the plain optimizer, or one of any number of ranks, has saved; not collective.

        Raises ValueError for a state of other variables.
        """
        entries = self._entries(variables)
        if len(store.keys()) != len(entries):
            raise ValueError(
                f"The saved optimizer has {len(store.keys())} variables, and this one has {len(entries)}. Load the "
                f"state of an optimizer with the same options for the same variables."
            )
        kept = {}
        for number, entry in enumerate(entries):
            array = np.array(store[str(number)])
            whole = entry.variable if entry.tensor < 0 else self.variables[entry.tensor]
            if tuple(array.shape) != tuple(whole.shape):
                raise ValueError(
                    f"Variable {number} of the saved optimizer has the shape {tuple(array.shape)} in place of "
                    f"{tuple(whole.shape)}. Load the state of an optimizer of the same variables."
                )
            if entry.tensor < 0:
                entry.variable.assign(array)
            else:
                kept[number] = _storage(array.astype(_numpy_dtype(whole)), whole.dtype)
        for number, array in kept.items():
            self._put(entries[number], array)
        self._kept = kept

    def _put(self, entry: Entry, whole: Array) -> None:
        """Give this rank's pieces of a tensor their part of a slot."""
        whole = whole.view(_numpy_dtype(self.variables[entry.tensor]))
        for piece, variable in zip(self.placed, entry.slot, strict=False):
            if piece.tensor == entry.tensor:
                variable.assign(whole[piece.offset : piece.offset + piece.count])

    def take_over(self, variables: Sequence[Any], steps: int, root: int, broadcast: Any) -> None:
        """Give all ranks their part of the state that rank `root` has loaded, if it has; collective.

        steps: that have been taken; what was kept before the last of them is out of date. broadcast: sends an object of
        rank `root` to all.
        """
        known = self._kept if steps <= self._kept_at else None
        numbers = broadcast(None if known is None else sorted(known), root)
        if numbers is None:
            return
        mine, self._kept = self._kept or {}, None
        entries = self._entries(variables)
        for number in numbers:
            self._put(entries[number], broadcast(mine.pop(number, None), root))


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _numpy_dtype(variable: Any) -> np.dtype[Any]:
    return np.dtype(_dtype(variable))  # Keras has loaded ml_dtypes, which names bfloat16


def _storage(array: Array, dtype: Any) -> Array:
    flat: Array = np.ascontiguousarray(array).reshape(-1)
    return flat.view(STORAGE[str(keras.backend.standardize_dtype(dtype))])


def _count(variable: Any) -> int:
    return int(np.prod(variable.shape))
