"""Validation on shard()'s training data: repeated rows are left out, so that each row counts once."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

#: id() of a result of shard() with a repeated element -> (reference to it, function that removes that element).
_repeated: dict[int, tuple[weakref.ref[Any], Callable[[Any], Any]]] = {}


def note_repeated(part: Any, without: Callable[[Any], Any]) -> Any:
    """Record that the last element of a shard is a repeated one; returns the shard.

    without: function that returns the shard without that element.
    """
    key = id(part)
    _repeated[key] = weakref.ref(part, lambda _: _repeated.pop(key, None)), without
    return part


def counted_once(data: Any) -> Any:
    """Return evaluation data, an array, a structure of arrays or a dataset, without a repeated element."""
    leaves = keras.tree.flatten(data)
    known = [leaf for leaf in leaves if id(leaf) in _repeated]
    if not known:
        return data
    lengths = {len(leaf) for leaf in known if hasattr(leaf, "shape")}
    if lengths == {1} and keras.backend.backend() == "jax":
        raise ValueError(
            "There are fewer rows for the evaluation than ranks, so that this rank has none, and Keras on JAX cannot "
            "evaluate no rows. Pass all rows on every rank."
        )

    def leave_out(leaf: Any) -> Any:
        if id(leaf) in _repeated:
            return _repeated[id(leaf)][1](leaf)
        # The script's own weights for the rows of its shard.
        return leaf[:-1] if hasattr(leaf, "shape") and leaf.shape and len(leaf) in lengths else leaf

    return keras.tree.map_structure(leave_out, data)


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
        given = {key: bound.arguments[key] for key in arguments if bound.arguments.get(key) is not None}
        bound.arguments.update(counted_once(given))
        return own(*bound.args, **bound.kwargs)

    setattr(kind, name, call)
