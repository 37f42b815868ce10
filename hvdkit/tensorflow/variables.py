"""VariableSpec: the description of a variable before it has a gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.tensors import array_of, dtype_name
from hvdkit.transport.buffer import Array


@dataclass(frozen=True)
class VariableSpec:
    """A variable's description, equal on all ranks. shape: with every dimension; dtype: in the engine's words."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def describe(variables: Sequence[Any]) -> tuple[VariableSpec, ...]:
    """Describe variables by the properties that must be equal on all ranks.

    variables: of TensorFlow or Keras, or tensors. Omits counters in automatic names: a rank may have made other
    models before. Raises ValueError for a tensor of unknown shape, TypeError for a dtype that cannot be sent.
    """
    return tuple(
        VariableSpec(_name(variable, at), _shape(variable, at), dtype_name(variable.dtype))
        for at, variable in enumerate(variables)
    )


def _name(variable: Any, at: int) -> str:
    name = getattr(variable, "path", "") or _own_name(variable)
    if not isinstance(name, str) or not name:
        return f"number {at}"
    return re.sub(r"_\d+(?=/|$)", "", name.partition(":")[0])


def _own_name(variable: Any) -> str:
    try:
        return str(variable.name)
    except AttributeError:  # for an eager tensor
        return ""


def _shape(variable: Any, at: int) -> tuple[int, ...]:
    shape = variable.shape
    dimensions = (None,) if getattr(shape, "rank", 0) is None else tuple(shape)
    if any(dimension is None for dimension in dimensions):
        raise ValueError(
            f"{_name(variable, at)} has shape {shape}. hvdkit reduces gradients of variables and tensors only if their "
            f"shape is fully known. Make a variable without shape=, and a new one for another shape; set a tensor's "
            f"shape with tf.ensure_shape()."
        )
    return tuple(int(dimension) for dimension in dimensions)


def view_of(variable: Any) -> Array:
    """View the values of a variable, of TensorFlow or Keras, in its own memory, which must not be written.

    Drop the view before the variable changes: otherwise TensorFlow would move the variable.
    """
    own = variable if isinstance(variable, tf.Variable) else variable.value
    return array_of(own.value())
