"""Which optimizers of Keras may step on pieces of variables, and with which options."""

from __future__ import annotations

from typing import Any

import keras

#: Known by their definitions: every element is treated by itself, with numbers that all elements share.
_KNOWN = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Lion", "Ftrl")
_OF_TORCH = "keras.src.backend.torch.optimizers."  # the same, for all variables at once


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose state cannot be divided."""
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(_LOSS_SCALE)
    own = type(optimizer) is getattr(keras.optimizers, name, None) or type(optimizer).__module__.startswith(_OF_TORCH)
    if name not in _KNOWN or not own:
        raise ValueError(
            f"DistributedOptimizer(): shard= needs an optimizer of Keras that treats every element by itself "
            f"({', '.join(_KNOWN)}), but got {type(optimizer).__module__}.{name}. Leave out shard, or use one of them."
        )
    if optimizer.use_ema:
        raise ValueError(
            "DistributedOptimizer(): shard= cannot be combined with use_ema=True, since averages of the weights are "
            "read by Keras as a whole. Leave out one of them."
        )
    if optimizer.built:
        raise ValueError(
            f"DistributedOptimizer(): shard= divides the state when it is made, but this {name} is already built. Wrap "
            f"a new one: keras.optimizers.{name}.from_config(optimizer.get_config()). A saved state can be loaded "
            f"afterwards, with model.load_weights() or hvd.checkpoint.load()."
        )


def refuse_loss_scale() -> None:
    """Raise ValueError: a LossScaleOptimizer is put around an optimizer whose state is divided."""
    raise ValueError(_LOSS_SCALE)


_LOSS_SCALE = (
    "DistributedOptimizer(): shard= cannot be combined with a LossScaleOptimizer, which looks at whole gradients. Use "
    "mixed_bfloat16, which needs none (compile() puts one around the optimizer of a mixed_float16 model), or "
    "loss_scale_factor=, or leave out shard."
)
