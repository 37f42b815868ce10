"""Validation on shard()'s training data: repeated rows are left out, so that each row counts once."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

#: id() of a result of shard() with a repeated element -> (reference to it, function that removes that element).
_repeated: dict[int, tuple[weakref.ref[Any], Callable[[Any], Any]]] = {}


def note_repeated(part: Any, without: Callable[[Any], Any]) -> Any:
    """Record that the last element of a shard is a repeated one; returns the shard.

    without: function that returns the shard without that element.
    """
    key = id(part)
    _repeated[key] = weakref.ref(part, lambda _: _repeated.pop(key, None)), without
    return part


def _removal(leaf: Any) -> Callable[[Any], Any] | None:
    """Return the function that removes the repeated element of a leaf; None if it is not known to have one.

    A view of a numpy array has the repeated row if its last row, and no other one, is in the memory of that row. A view
    of one row keeps it: not every backend can evaluate no rows.
    """
    if id(leaf) in _repeated:
        return _repeated[id(leaf)][1]
    if isinstance(leaf, np.ndarray) and leaf.base is not None and leaf.ndim and len(leaf) > 1:
        for reference, _ in tuple(_repeated.values()):
            whole = reference()
            if isinstance(whole, np.ndarray) and (leaf.base is whole or leaf.base is whole.base):
                repeated = whole[-1:]
                if np.shares_memory(leaf[-1:], repeated) and not np.shares_memory(leaf[:-1], repeated):
                    return lambda rows: rows[:-1]
    return None


def counted_once(data: Any) -> Any:
    """Return evaluation data, an array, a structure of arrays or a dataset, without a repeated element."""
    leaves = keras.tree.flatten(data)
    removals = {id(leaf): removal for leaf in leaves if (removal := _removal(leaf)) is not None}
    known = [leaf for leaf in leaves if id(leaf) in removals]
    if not known:
        return data
    lengths = {len(leaf) for leaf in known if hasattr(leaf, "shape")}
    if lengths == {1} and keras.backend.backend() == "jax":
        raise ValueError(
            "There are fewer rows for the evaluation than ranks, so that this rank has none, and Keras on JAX cannot "
            "evaluate no rows. Pass all rows on every rank."
        )

    def leave_out(leaf: Any) -> Any:
        if id(leaf) in removals:
            return removals[id(leaf)](leaf)
        # The script's own weights for the rows of its shard.
        return leaf[:-1] if hasattr(leaf, "shape") and leaf.shape and len(leaf) in lengths else leaf

    return keras.tree.map_structure(leave_out, data)


def _split(arguments: dict[str, Any]) -> None:
    """Divide the data of fit(validation_split=...) as Keras does, so that its validation data are known.

    arguments: of fit(), which are changed if the data are arrays of which one has a repeated row.
    """
    names = ("x", "y", "sample_weight")
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    leaves = keras.tree.flatten(given)
    share, lengths = arguments.get("validation_split"), {len(leaf) for leaf in leaves if getattr(leaf, "shape", ())}
    if not share or arguments.get("validation_data") is not None or len(lengths) != 1 or "x" not in given:
        return
    (rows,) = lengths
    first = math.floor(rows * (1 - share))
    arrays = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    if not arrays or not 0 < first < rows or all(_removal(leaf) is None for leaf in leaves):
        return  # Keras divides them, or refuses them
    validation = keras.tree.map_structure(lambda array: array[first:], given)
    arguments.update(keras.tree.map_structure(lambda array: array[:first], given))
    arguments["validation_split"] = 0.0
    arguments["validation_data"] = tuple(validation.get(name) for name in names)


def install() -> None:
    """Patch fit() and evaluate() of all models to count each row of validation once."""
    _give_once(keras.Model, "fit", ("validation_data",))
    _give_once(keras.Model, "evaluate", ("x", "y", "sample_weight"))


def _give_once(kind: Any, name: str, arguments: tuple[str, ...]) -> None:
    own = getattr(kind, name)
    signature = inspect.signature(own)

    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _repeated:
            return own(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        if "validation_split" in bound.arguments:
            _split(bound.arguments)
        given = {key: bound.arguments[key] for key in arguments if bound.arguments.get(key) is not None}
        bound.arguments.update(counted_once(given))
        return own(*bound.args, **bound.kwargs)

    setattr(kind, name, call)
