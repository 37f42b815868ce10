"""Reduction on the PyTorch backend: during backward if possible, else when gradients are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.strategy import Strategy
from hvdkit.keras.settings import OptimizerSettings, name_variables
from hvdkit.torch.data.balanced import weighted
from hvdkit.torch.data.compute_clock import ComputeClock
from hvdkit.torch.sparse import SparseGradients
from hvdkit.torch.strategies import TorchAllReduce
from hvdkit.torch.sync import GradientSync


class TorchDriver:
    """See backends.StrategyDriver.

    `loss.backward()` writes the gradients to the parameters, where the hooks of hvdkit.torch see them, so they are
    reduced before `apply`. Gradients from elsewhere (torch.autograd.grad, accumulated ones) are reduced in `apply`.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._hooked: GradientSync | None = None
        self._others: dict[tuple[int, ...], GradientSync] = {}  # without hooks
        self._reduced: GradientSync | None = None  # that has reduced this step's gradients
        self._gradient_hook: GradientHook | None = None
        self._tensors: _TensorHook | None = None

    def prepare(self, variables: Sequence[Any]) -> None:
        strategy = self._make_strategy()
        # A sum must not be computed twice over a gradient to which two backward passes add, as in a GAN; an average of
        # values that are equal on all ranks changes nothing.
        if self._hooked is not None or not strategy.repeatable:
            return
        parameters = [variable.value for variable in variables]
        if any(parameter.device.type == "meta" for parameter in parameters):
            return
        sparse = None
        if isinstance(strategy, AllReduce) and not self._settings.sparse_as_dense:
            sparse = SparseGradients(average=strategy.options.average)
        named = list(zip(name_variables(variables), parameters, strict=True))
        self._hooked = GradientSync(named, self._settings.process_set, strategy, sparse=sparse)
        self._install_hook()

    def _make_strategy(self) -> Strategy:
        settings = self._settings
        return TorchAllReduce(settings.options) if settings.strategy is None else settings.strategy

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        parameters = [variable.value for variable in variables]
        pairs = zip(gradients, parameters, strict=True)
        if self._hooked is None or not all(gradient is parameter.grad for gradient, parameter in pairs):
            return self._reduce_given(gradients, variables, parameters)
        reduced = self._begin_step(self._hooked, parameters)
        if self._tensors is not None:
            self._tensors.reduced(self._hooked)
        return reduced

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        return self._reduce_given(gradients, variables, [variable.value for variable in variables])

    def _reduce_given(
        self, gradients: Sequence[Any], variables: Sequence[Any], parameters: list[torch.nn.Parameter]
    ) -> list[Any]:
        """Return reduced gradients in new tensors, without changing the given ones or those of the parameters."""
        if self._gradient_hook is not None:
            raise ValueError(
                "BalancedDataset: the optimizer got gradients that loss.backward() has not just computed, so they are "
                "not weighted by rows. On PyTorch use fit(), or pass the gradients of the variables as they are."
            )
        sync = self._other_of(variables)
        own = [parameter.grad for parameter in parameters]
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.detach().to(parameter.dtype, copy=True)
            return self._begin_step(sync, parameters)
        finally:
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient

    def _other_of(self, variables: Sequence[Any]) -> GradientSync:
        key = tuple(map(id, variables))
        if key not in self._others:
            named = [(name, each.value) for name, each in zip(name_variables(variables), variables, strict=True)]
            self._others[key] = GradientSync(named, self._settings.process_set, self._make_strategy(), hooks=False)
        return self._others[key]

    def _begin_step(self, sync: GradientSync, parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
        self._reduced = sync
        sync.begin_step(None, skip=False)
        sync.end_window()
        return [parameter.grad for parameter in parameters]

    def attach(self, variables: Sequence[Any]) -> None:
        if self._reduced is None:
            self._reduced = self._other_of(variables) if self._hooked is None else self._hooked
        self._reduced.attach()

    def after_step(self, due: Any) -> None:
        if self._reduced is not None and due:
            self._reduced.end_step()

    def change_values(self, change: Callable[[], None]) -> None:
        if self._reduced is not None:
            change()

    def set_gradient_hook(self, hook: GradientHook) -> None:
        self._gradient_hook = hook
        self._install_hook()

    def _install_hook(self) -> None:
        if self._hooked is not None and self._gradient_hook is not None:
            self._tensors = _TensorHook(self._gradient_hook, ComputeClock(self._hooked.strategy))
            self._hooked.set_gradient_hook(self._tensors)

    def agree(self, flag: Any) -> Any:
        return torch.tensor(self._settings.agree(flag))

    def enter(self) -> None:
        if self._hooked is not None:
            self._hooked.enter()
            self._hooked.zeroed()  # a backward pass may have been interrupted

    def close(self) -> None:
        if self._hooked is not None:
            self._hooked.close()
        for sync in self._others.values():
            sync.close()
        # They are numbered at their first use: a rank that comes later has none of them.
        self._others.clear()
        self._reduced = None


class _TensorHook:
    """A TensorHook, for hvdkit.torch's GradientSync, that calls a GradientHook of arrays."""

    def __init__(self, hook: GradientHook, clock: ComputeClock) -> None:
        self._gradient_hook, self._clock = hook, clock

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self._clock.gradient(gradient)
        # Queried for each gradient: a backward pass may be interrupted, and followed by another step.
        return weighted(gradient, self._gradient_hook.begin_step())

    @property
    def weight(self) -> float:
        """See TensorHook; it would weight the loss of closures, which Keras does not have."""
        return self._gradient_hook.begin_step()

    def stepped(self, sync: GradientSync) -> None:
        """Do nothing, as a LossScaleOptimizer may skip the step."""

    def reduced(self, sync: GradientSync) -> None:
        """Called when the gradients of a step are reduced."""
        self._gradient_hook.reduced(sync, self._clock.step())
