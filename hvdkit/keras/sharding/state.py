"""The slices that one optimizer trains, and its state: gathered from all ranks, and divided again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.engine.sharding.whole_state import RangeState, gather_state
from hvdkit.keras.backends import settle
from hvdkit.keras.sharding.layout import Entry, SlotLayout
from hvdkit.keras.sharding.sync import ShardSync
from hvdkit.transport.buffer import STORAGE, Array, Buffer

#: Attribute of variables with different elements on each rank.
IS_PIECE = "hvdkit_is_piece"
_LOAD_SAME = "Load the state of an optimizer with the same options for the same variables."


class Parts:
    """This rank's slices of some variables.

    pieces: one variable per slice, and a last one of one element without a tensor: Keras does not count a step
    without gradients. layout: filled while the optimizer is built on them. reduced: the variables whose gradients are
    already reduced to slices; None for whole gradients.
    """

    def __init__(self, sync: ShardSync, variables: Sequence[Any]) -> None:
        self.sync, self.variables, self.layout = sync, list(variables), SlotLayout()
        self.driver = sync.open(self.variables)
        self.index_of = {id(variable): index for index, variable in enumerate(self.variables)}
        self._tensor_of: dict[int, int] = {}
        own = [self.driver.make_piece(piece, self.variables[piece.tensor].name) for piece in self.ranges]
        for piece, variable in zip(self.ranges, own, strict=True):
            variable._path = self.variables[piece.tensor].path
            self._tensor_of[id(variable)] = piece.tensor
        self.pieces = [*own, keras.Variable(np.zeros(1), dtype=self.variables[0].dtype, trainable=False)]
        self.window: Sequence[Any] = ()  # the slices whose gradients are being clipped
        self.reduced: Sequence[Any] | None = None
        self._whole_state: dict[int, Array] | None = None  # the slots of all slices, by number in the plain optimizer
        self._whole_state_step = -1

    @property
    def ranges(self) -> Sequence[TensorRange]:
        """The segments of this rank's slices."""
        return self.driver.arrays.pieces

    def tensors_of(self, pieces: Sequence[Any]) -> list[int]:
        """Return the index of each slice's variable; -1 for none."""
        return [self._tensor_of.get(id(piece), -1) for piece in pieces]

    @contextmanager
    def reduced_of(self, variables: Sequence[Any]) -> Iterator[None]:
        """Context in which gradients are those of slices. variables: to which they belong."""
        self.reduced = variables
        try:
            yield
        finally:
            self.reduced = None

    def _entries(self, variables: Sequence[Any]) -> list[Entry]:
        return list(self.layout.entries(variables, len(self.variables)))

    def gather(self, variables: Sequence[Any], steps: int, *, keep: bool) -> None:
        """Gather the whole state; collective. variables: the optimizer's. keep: whether this rank needs it."""
        settle()
        slots = {id(slot): str(number) for number, slot in enumerate(self.layout.slots())}
        ranges = [
            RangeState(
                piece.tensor,
                piece.offset,
                piece.count,
                {str(number): _buffer(slot[index]) for number, slot in enumerate(self.layout.slots())},
            )
            for index, piece in enumerate(self.ranges)
        ]
        counts = [_count(variable) for variable in self.variables]
        names, divided = [variable.path for variable in self.variables], range(len(self.variables))
        whole = self.sync.together(
            "sharded_state",
            lambda transport, _: gather_state(transport, ranges, counts, names, divided=divided, wanted=keep),
        )
        self._whole_state = None
        if keep:
            self._whole_state = {
                number: whole[entry.tensor][slots[id(entry.slot)]].array
                for number, entry in enumerate(self._entries(variables))
                if entry.tensor >= 0
            }
            self._whole_state_step = steps

    def release(self) -> None:
        """Free the whole state."""
        self._whole_state = None

    def save(self, variables: Sequence[Any], steps: int, store: Any) -> None:
        """Write the plain optimizer's variables; not collective. steps: number of steps so far.

        Raises RuntimeError if the state was not gathered since the last step.
        """
        if self._whole_state is None or self._whole_state_step != steps:
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
        assert self._whole_state is not None
        whole = self.variables[entry.tensor]
        array = self._whole_state[number]
        return array.view(_numpy_dtype(whole)).reshape(tuple(whole.shape))

    def load(self, variables: Sequence[Any], store: Mapping[str, Any]) -> None:
        """Load the state of the plain optimizer, or of a sharded one with any number of ranks; not collective.

        Raises ValueError, the same on all ranks that load it, for a damaged state or one of other variables; nothing is
        changed then.
        """
        entries = self._entries(variables)
        if len(store.keys()) != len(entries):
            raise ValueError(
                f"The saved optimizer has {len(store.keys())} variables, and this one has {len(entries)}. {_LOAD_SAME}"
            )
        arrays = [self._read(store, number, entry) for number, entry in enumerate(entries)]
        for entry, array in zip(entries, arrays, strict=True):
            if entry.tensor < 0:
                entry.variable.assign(array)
        kept = {
            number: _storage(array, self.variables[entry.tensor].dtype)
            for number, (entry, array) in enumerate(zip(entries, arrays, strict=True))
            if entry.tensor >= 0
        }
        for number, array in kept.items():
            self._put(entries[number], array)
        self._whole_state = kept

    def _read(self, store: Mapping[str, Any], number: int, entry: Entry) -> Array:
        """Read a variable of a saved state, in the dtype of this optimizer's. Raises ValueError if it does not fit."""
        whole = entry.variable if entry.tensor < 0 else self.variables[entry.tensor]
        which = f"Variable {number} of the saved optimizer, {'' if entry.tensor < 0 else 'of '}{whole.path},"
        if str(number) not in (keys := list(store.keys())):
            raise ValueError(f"{which} is missing: its keys are {', '.join(keys)}. {_LOAD_SAME}")
        array = np.array(store[str(number)])
        if array.dtype.kind in "OSU":
            raise ValueError(f"{which} has the dtype {array.dtype} in place of numbers. {_LOAD_SAME}")
        if tuple(array.shape) != tuple(whole.shape):
            raise ValueError(
                f"{which} has the shape {tuple(array.shape)} in place of {tuple(whole.shape)}. {_LOAD_SAME}"
            )
        return array.astype(_numpy_dtype(whole))

    def _put(self, entry: Entry, whole: Array) -> None:
        """Assign this rank's slices of a tensor from the whole slot."""
        whole = whole.view(_numpy_dtype(self.variables[entry.tensor]))
        for piece, variable in zip(self.ranges, entry.slot, strict=False):
            if piece.tensor == entry.tensor:
                variable.assign(whole[piece.elements])

    def take_over(self, variables: Sequence[Any], steps: int, root: int, broadcast: Any) -> None:
        """Distribute the state that rank `root` has loaded, if it has, to all ranks; collective.

        variables: the optimizer's.
        steps: number of steps so far; state that was kept before the last of them is outdated.
        root: the rank that has loaded.
        broadcast: sends an object of rank `root` to all.
        """
        known = self._whole_state if steps <= self._whole_state_step else None
        numbers = broadcast(None if known is None else sorted(known), root)
        if numbers is None:
            return
        mine, self._whole_state = self._whole_state or {}, None
        entries = self._entries(variables)
        for number in numbers:
            self._put(entries[number], broadcast(mine.pop(number, None), root))


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _numpy_dtype(variable: Any) -> np.dtype[Any]:
    return np.dtype(_dtype(variable))  # Keras has loaded ml_dtypes, which registers bfloat16


def _storage(array: Array, dtype: Any) -> Array:
    flat: Array = np.ascontiguousarray(array).reshape(-1)
    return flat.view(STORAGE[str(keras.backend.standardize_dtype(dtype))])


def _buffer(variable: Any) -> Buffer:
    """Return the variable's numbers in host memory, (n,)."""
    return Buffer(_storage(keras.ops.convert_to_numpy(variable), variable.dtype), _dtype(variable))


def _count(variable: Any) -> int:
    return int(np.prod(variable.shape))
