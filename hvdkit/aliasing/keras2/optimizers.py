"""Optimizers: `lr=`, `decay=`, `optimizer.lr`, `optimizer.variables()`, get_weights(), keras.optimizers.legacy."""

from __future__ import annotations

import importlib
import numbers
import sys
from types import ModuleType
from typing import Any

from hvdkit.aliasing.said import warn_once

#: Arguments that have no effect any more.
_IDLE = ("schedule_decay", "jit_compile", "is_legacy_optimizer")
_DECAY = "_hvdkit_decay"


class Variables(list[Any]):
    """A list of variables that can also be called, as `optimizer.variables()`."""

    def __call__(self) -> Variables:
        """Return the list itself."""
        warn_once("optimizer.variables is a list in Keras 3; hvdkit also accepts the call. Write optimizer.variables.")
        return self


def apply(keras: ModuleType) -> None:
    """Patch the base class of all optimizers."""
    base = importlib.import_module("keras.src.optimizers.base_optimizer").BaseOptimizer
    if not isinstance(base.variables, property):
        return  # this version of Keras still has optimizer.variables()
    own_init, own_rate, own_config = base.__init__, base._get_current_learning_rate, base.get_config
    own_variables: Any = base.variables.fget
    own_property: Any = base.learning_rate
    ops = keras.ops

    def __init__(self: Any, learning_rate: Any, *args: Any, **kwargs: Any) -> None:
        learning_rate, kwargs, decay = translate(learning_rate, kwargs)
        variable = learning_rate if _is_variable(learning_rate) else None
        own_init(self, learning_rate if variable is None else float(variable.numpy()), *args, **kwargs)
        if variable is not None:
            self._learning_rate._value = getattr(variable, "_value", variable)  # the script assigns to its variable
        if decay:
            setattr(self, _DECAY, decay)

    def current(self: Any) -> Any:
        rate, decay = own_rate(self), self.__dict__.get(_DECAY)
        return rate / (1.0 + decay * ops.cast(self.iterations, rate.dtype)) if decay else rate

    def learning_rate(self: Any) -> Any:
        return self._learning_rate if _DECAY in self.__dict__ else own_property.fget(self)

    def get_config(self: Any) -> dict[str, Any]:
        decay = self.__dict__.get(_DECAY)
        return {**own_config(self), **({"decay": decay} if decay else {})}

    def get_rate(self: Any) -> Any:
        warn_once("optimizer.lr was renamed in Keras 3; hvdkit uses optimizer.learning_rate instead.")
        return self.learning_rate

    def set_rate(self: Any, value: Any) -> None:
        warn_once("optimizer.lr was renamed in Keras 3; hvdkit uses optimizer.learning_rate instead.")
        self.learning_rate = value

    base.__init__ = __init__
    base._get_current_learning_rate = current
    base.learning_rate = property(learning_rate, own_property.fset)
    base.get_config = get_config
    base.lr = property(get_rate, set_rate)
    base.variables = property(lambda self: Variables(own_variables(self)))
    base.weights = property(lambda self: Variables(own_variables(self)))
    base.get_weights = _get_weights
    base.set_weights = _set_weights
    base._create_all_weights = lambda self, variables: self.build(list(variables))
    base._decayed_lr = lambda self, dtype: ops.cast(self._get_current_learning_rate(), dtype)


def translate(learning_rate: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any], float]:
    """Convert Keras 2's learning rate and arguments to Keras 3's; also returns the decay of the rate in each step.

    Keras itself then raises an error for an argument that neither version has.
    """
    given = dict(given)
    for name in _IDLE:
        if given.pop(name, None) is not None:
            warn_once(f"The optimizer argument {name}= was removed in Keras 3; it is ignored.")
    if "lr" in given:
        learning_rate = given.pop("lr")
        warn_once("The optimizer argument lr= was renamed in Keras 3; hvdkit passes it as learning_rate=.")
    decay = float(given.pop("decay", None) or 0.0)
    if decay:
        warn_once(
            "The optimizer argument decay= was removed in Keras 3; hvdkit divides the learning rate by "
            "1 + decay * iterations, as Keras 2 did. Write keras.optimizers.schedules.InverseTimeDecay."
        )
    if isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, float):
        learning_rate = float(learning_rate)  # Keras 3 accepts neither 1 nor a float32 of numpy
    return learning_rate, given, decay


def _is_variable(learning_rate: Any) -> bool:
    """Is it a variable of TensorFlow, or of Keras on it? Keras 3 accepts neither; Keras 2 read it at each step."""
    tf = sys.modules.get("tensorflow")
    if tf is None or sys.modules["keras"].backend.backend() != "tensorflow":
        return False
    if not isinstance(getattr(learning_rate, "_value", learning_rate), tf.Variable):
        return False
    warn_once("An optimizer's learning_rate= is a variable, which Keras 3 refuses; hvdkit has the optimizer use it.")
    return True


def _get_weights(self: Any) -> list[Any]:
    return [variable.numpy() for variable in self.variables]


def _set_weights(self: Any, weights: Any) -> None:
    """Assign weights of get_weights(), or of Keras 2, which saved no learning rate: then the rate does not change."""
    variables = list(self.variables)
    if len(weights) == len(variables) - 1:
        variables = [variable for variable in variables if variable is not self._learning_rate]
    if len(weights) != len(variables):
        raise ValueError(f"set_weights() got {len(weights)} arrays, but the optimizer has {len(variables)} variables.")
    for variable, value in zip(variables, weights, strict=True):
        variable.assign(value)


def apply_to_legacy(legacy: ModuleType) -> None:
    """Make keras.optimizers.legacy.X the same as keras.optimizers.X."""
    optimizers = importlib.import_module("keras.optimizers")

    def find(name: str) -> Any:
        warn_once(
            f"keras.optimizers.legacy.{name} was removed in Keras 3; hvdkit uses keras.optimizers.{name} instead."
        )
        return getattr(optimizers, name)

    for name in [one for one in vars(legacy) if not one.startswith("_")]:
        delattr(legacy, name)
    legacy.__getattr__ = find  # type: ignore[method-assign]
