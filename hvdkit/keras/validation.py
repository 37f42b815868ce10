"""Validation on what shard() made for training: rows that it repeated on a rank are left out, so each counts once."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

#: By id of what shard() returned with an element repeated: a reference to it, and what makes the same without that one.
_repeated: dict[int, tuple[weakref.ref[Any], Callable[[Any], Any]]] = {}


def note_repeated(part: Any, without: Callable[[Any], Any]) -> Any:
    """Keep in mind that the last element of a part is a repeated one; returns the part.

    without: makes the part without it, of the part.
    """
    key = id(part)
    _repeated[key] = weakref.ref(part, lambda _: _repeated.pop(key, None)), without
    return part


def counted_once(data: Any) -> Any:
    """Data for an evaluation, an array or a structure of them or a dataset, without the element that is repeated."""
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
        # Weights of the script's own, for the rows that it got.
        return leaf[:-1] if hasattr(leaf, "shape") and leaf.shape and len(leaf) in lengths else leaf

    return keras.tree.map_structure(leave_out, data)


def install() -> None:
    """Have fit() and evaluate() of every model count each row of validation once."""
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
