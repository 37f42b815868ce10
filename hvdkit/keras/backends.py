"""What differs between the backends of Keras: how gradients are reduced inside a training step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import keras

from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.errors import ConfigError
from hvdkit.keras.settings import Settings

Function = TypeVar("Function", bound=Callable[..., Any])


class StrategyDriver(Protocol):
    """Calls the strategy of one optimizer from its training steps, compiled or not; one implementation a backend.

    Gradients and variables come as two lists of one length, in the same order on all ranks. What is returned takes the
    gradients' place; None stays None unless another rank has the gradient.
    """

    def __init__(self, settings: Settings) -> None: ...

    def prepare(self, variables: Sequence[Any]) -> None:
        """These will be trained, one backward pass a step: what can be reduced during backward may be."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients; collective, inside of a compiled step as well as outside."""

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """Reduce accumulated gradients. due: whether this is the last pass of a window, for backends whose optimizer
        goes through here in every pass."""

    def attach(self, variables: Sequence[Any]) -> None:
        """Attach the strategy to these, if no step has attached it; collective then."""

    def after_step(self, due: Any) -> None:
        """The optimizer has stepped on the gradients that were reduced last; collective where the strategy is.

        due: has it? A bool of the backend, the same on all ranks: it has not in the middle of a window.
        """

    def change_values(self, change: Callable[[], None]) -> None:
        """Have the strategy change the variables between two steps, by `change`; collective if that is.

        Does nothing before the first step.
        """

    def set_gradient_hook(self, hook: GradientHook) -> None:
        """Have one object, and no other any more, take part in each step from now on.

        Raises ValueError, or the step does, for gradients that it cannot weight.
        """

    def agree(self, flag: Any) -> Any:
        """Is a scalar bool true on all ranks? Collective."""

    def enter(self) -> None:
        """Take up the work among the ranks that there are now: after close() and another init(). Not collective.

        Steps that were compiled before are to go on with them.
        """

    def close(self) -> None:
        """Free what the strategy has allocated; collective."""


_DRIVERS = {
    "torch": "hvdkit.keras.sync_torch:TorchDriver",
    "jax": "hvdkit.keras.sync_jax:JaxDriver",
    "tensorflow": "hvdkit.keras.sync_tensorflow:TensorflowDriver",
}


def open_driver(settings: Settings) -> StrategyDriver:
    """The driver for the backend that Keras runs on. ConfigError for one that hvdkit has none for."""
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
    """The function, for a compiled step of PyTorch to call as it is; on other backends it is part of the step."""
    if keras.backend.backend() != "torch":
        return function
    left_alone: Function = importlib.import_module("hvdkit.torch.uncompiled").uncompiled(function)
    return left_alone


def uncompiled_later(function: Function) -> Function:
    """As uncompiled(), without loading PyTorch's compiler; for what a script may call before it compiles anything."""
    if keras.backend.backend() != "torch":
        return function
    left_alone: Function = importlib.import_module("hvdkit.torch.collective").uncompiled_later(function)
    return left_alone


def view_of(variable: Any) -> Any:
    """A variable's numbers as an array of numpy; in host memory they are its own, and not to be written to.

    To be let go of before the variable changes.
    """
    if keras.backend.backend() == "torch" and variable.dtype != "bfloat16":
        return variable.value.detach().cpu().numpy()
    if keras.backend.backend() == "tensorflow":
        return importlib.import_module("hvdkit.tensorflow.variables").view_of(variable)
    return keras.ops.convert_to_numpy(variable)


def settle() -> None:
    """Wait until the steps that have been started are done: on JAX they run on while the script goes on, and their
    collectives must not come among those of the main thread.

    Raises RankLostError or TransportError where NCCL could not reduce their gradients: numbers are of no use then.
    """
    if keras.backend.backend() == "jax":
        import jax

        from hvdkit.transport.nccl.groups import settle_groups

        jax.effects_barrier()
        settle_groups()
