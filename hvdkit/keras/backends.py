"""The differences of Keras' backends: StrategyDriver reduces gradients inside a step; the functions do the rest."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import keras

from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.errors import ConfigError
from hvdkit.keras.settings import OptimizerSettings

Function = TypeVar("Function", bound=Callable[..., Any])


class StrategyDriver(Protocol):
    """Calls the strategy of one optimizer from its training steps, compiled or not; one implementation per backend.

    Gradients and variables are two lists of one length, in the same order on all ranks. The results replace the
    gradients; None stays None unless another rank has the gradient.
    """

    def __init__(self, settings: OptimizerSettings) -> None: ...

    def prepare(self, variables: Sequence[Any]) -> None:
        """Prepare to train these variables with one backward pass a step, so that reductions can overlap backward."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients; collective, inside of a compiled step as well as outside."""

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """Reduce accumulated gradients.

        due: returns whether this is the last pass of a window, for backends whose optimizer calls this in every pass.
        """

    def attach(self, variables: Sequence[Any]) -> None:
        """Attach the strategy to these variables, unless a step has done so; collective then."""

    def after_step(self, due: Any) -> None:
        """Run the strategy after a step on the last reduced gradients; collective if the strategy is.

        due: whether the optimizer has stepped, a bool of the backend, equal on all ranks; False inside a window.
        """

    def change_values(self, change: Callable[[], None]) -> None:
        """Let the strategy change the variables between two steps, by `change`; collective if `change` is.

        Does nothing before the first step.
        """

    def set_gradient_hook(self, hook: GradientHook) -> None:
        """Set the object that takes part in each step from now on, in place of an earlier one.

        Raises ValueError, now or in a step, for gradients that it cannot weight.
        """

    def agree(self, flag: Any) -> Any:
        """Return whether a scalar bool is true on all ranks; collective."""

    def enter(self) -> None:
        """Continue among the present ranks, after close() and another init(); not collective.

        Already compiled steps must then use these ranks.
        """

    def close(self) -> None:
        """Free the memory that the strategy has allocated; collective."""


_DRIVERS = {
    "torch": "hvdkit.keras.sync_torch:TorchDriver",
    "jax": "hvdkit.keras.sync_jax:JaxDriver",
    "tensorflow": "hvdkit.keras.sync_tensorflow:TensorflowDriver",
}


def open_driver(settings: OptimizerSettings) -> StrategyDriver:
    """Open the driver for Keras's backend. Raises ConfigError for an unsupported backend."""
    name = keras.backend.backend()
    if name not in _DRIVERS:
        raise ConfigError(
            f"The Keras backend is {name!r}; hvdkit supports {', '.join(_DRIVERS)}. Set KERAS_BACKEND to one of them "
            f"before keras is imported."
        )
    module, _, kind = _DRIVERS[name].partition(":")
    driver: StrategyDriver = getattr(importlib.import_module(module), kind)(settings)
    return driver


def uncompiled(function: Function) -> Function:
    """Return the function so that a compiled step of PyTorch calls it untraced; other backends trace it."""
    if keras.backend.backend() != "torch":
        return function
    left_alone: Function = importlib.import_module("hvdkit.torch.uncompiled").uncompiled(function)
    return left_alone


def uncompiled_later(function: Function) -> Function:
    """As uncompiled(), without loading PyTorch's compiler; for functions that a script may call before compiling."""
    if keras.backend.backend() != "torch":
        return function
    left_alone: Function = importlib.import_module("hvdkit.torch.collective").uncompiled_later(function)
    return left_alone


def view_of(variable: Any) -> Any:
    """Return a variable's values as a numpy array; in host memory they are not copied, and must not be written.

    Drop the array before the variable changes.
    """
    if keras.backend.backend() == "torch" and variable.dtype != "bfloat16":
        return variable.value.detach().cpu().numpy()
    if keras.backend.backend() == "tensorflow":
        return importlib.import_module("hvdkit.tensorflow.variables").view_of(variable)
    return keras.ops.convert_to_numpy(variable)


def settle() -> None:
    """Wait until all started steps are done.

    On JAX they run asynchronously, and their collectives must not interleave with those of the main thread.

    Raises RankLostError or TransportError if NCCL could not reduce gradients; the variables are then invalid.
    """
    if keras.backend.backend() == "jax":
        import jax

        from hvdkit.transport.nccl.groups import wait_for_groups

        jax.effects_barrier()
        wait_for_groups()
