"""Check that an optimizer updates each element independently, so that it may step on slices of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.transport.buffer import Array

#: Known by their definitions: each element is updated independently, with numbers that all elements share.
_KNOWN = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Lion", "Ftrl")
_OF_TORCH = "keras.src.backend.torch.optimizers."  # the same optimizers, for all variables at once

_SHAPE, _STEPS = (4, 6), 3


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose state cannot be divided, or exists already.

    An unknown optimizer is tested: three steps on a small matrix, and on its elements as two vectors.
    """
    kind = type(optimizer)
    name = kind.__name__
    if optimizer.built:
        raise ValueError(
            f"DistributedOptimizer(): shard= divides the state when it is made, but this {name} is already built. Wrap "
            f"a new one: keras.optimizers.{name}.from_config(optimizer.get_config()). A saved state can be loaded "
            f"afterwards, with model.load_weights() or hvd.checkpoint.load()."
        )
    own = kind is getattr(keras.optimizers, name, None) or kind.__module__.startswith(_OF_TORCH)
    if name in _KNOWN and own:
        return
    try:
        differs = _differs(optimizer)
    except Exception as error:  # of any kind: it is another library's code
        why = f"it cannot step on a piece of a variable ({type(error).__name__}: {error})"
    else:
        if not differs:
            return
        why = "its step on a matrix differs from its steps on the same elements as two vectors"
    raise ValueError(
        f"DistributedOptimizer(): shard= needs an optimizer that treats every element by itself, as "
        f"{', '.join(_KNOWN)} do, and {kind.__module__}.{name} does not: {why}. Leave out shard, or use one of them."
    )


def check_slots(made: Sequence[Any], optimizer: Any, mark: str) -> None:
    """Raise ValueError for a state variable that is neither a number nor belongs to a variable.

    made: the variables of the state. mark: an attribute of state variables that were made for a variable.
    """
    for variable in made:
        if tuple(variable.shape) and not getattr(variable, mark, False):
            raise ValueError(
                f"DistributedOptimizer(): shard= cannot divide {variable.path}, which {type(optimizer).__name__} has "
                f"made of shape {tuple(variable.shape)}. Make it with add_optimizer_variables() or "
                f"add_variable_from_reference(), or leave out shard."
            )


def _differs(optimizer: Any) -> bool:
    random = np.random.RandomState(0)
    start, *gradients = (random.randn(*_SHAPE).astype(keras.config.floatx()) for _ in range(1 + _STEPS))
    whole = _run(optimizer, start, gradients, value_when_built=start).reshape(-1)
    cut = start.size // 3
    parts = []
    for part in (slice(cut), slice(cut, None)):  # one after the other, as on two ranks
        piece = start.reshape(-1)[part]
        pieces = [gradient.reshape(-1)[part] for gradient in gradients]
        parts.append(_run(optimizer, piece, pieces, value_when_built=np.zeros_like(piece)))
    moved = not np.array_equal(whole, start.reshape(-1))
    return not moved or not np.allclose(whole, np.concatenate(parts), rtol=1e-5, atol=1e-7)


def _run(optimizer: Any, start: Array, gradients: Sequence[Array], *, value_when_built: Array) -> Array:
    """Return the values after steps of an optimizer of the same class and options.

    Omits clipping of norms, which ShardedOptimizer does, and accumulation, with which the steps might change nothing.
    """
    config = optimizer.get_config()
    left_out = ("clipnorm", "global_clipnorm", "gradient_accumulation_steps")
    config.update({name: None for name in left_out if name in config})
    if isinstance(config.get("learning_rate"), float):
        config["learning_rate"] = 0.1  # a warm-up may begin with 0
    trial = type(optimizer).from_config(config)
    variable = keras.Variable(value_when_built, name="trial")
    trial.build([variable])
    variable.assign(start)
    for gradient in gradients:
        trial.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return np.array(keras.ops.convert_to_numpy(variable))
