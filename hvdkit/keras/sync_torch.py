"""Gradients on the PyTorch backend: reduced while backward runs where that can be, else when they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.engine.named.collective_step import collective_step
from hvdkit.engine.reduce_op import Average
from hvdkit.keras.settings import Settings, name_variables
from hvdkit.torch.source import TorchSource
from hvdkit.torch.sparse import SparseGradients
from hvdkit.torch.strategies import TorchAllReduce
from hvdkit.torch.sync import GradientSync
from hvdkit.transport.api import Transport


class TorchReducer:
    """See backends.Reducer.

    `loss.backward()` leaves the gradients in the parameters, so the hooks of hvdkit.torch see them: what comes to
    `apply` is reduced already. Gradients from elsewhere (torch.autograd.grad, accumulated ones) are reduced in `apply`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hooked: GradientSync | None = None
        self._plans: dict[tuple[int, ...], _GivenGradients] = {}

    def prepare(self, variables: Sequence[Any]) -> None:
        """See Reducer.prepare."""
        # A sum must not be taken twice of a gradient that two backward passes add to, as those of a GAN do; an average
        # of what is equal on all ranks changes nothing.
        if self._hooked is not None or self._settings.op is not Average:
            return
        parameters = [variable.value for variable in variables]
        if any(parameter.device.type == "meta" for parameter in parameters):
            return
        options = self._settings.options
        self._hooked = GradientSync(
            list(zip(name_variables(variables), parameters, strict=True)),
            self._settings.process_set,
            TorchAllReduce(options),
            sparse=None if self._settings.sparse_as_dense else SparseGradients(average=options.average),
        )

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See Reducer.reduce."""
        parameters = [variable.value for variable in variables]
        own = all(one is parameter.grad for one, parameter in zip(gradients, parameters, strict=True))
        if self._hooked is None or not own:
            return self._reduce_given(gradients, variables, parameters)
        self._hooked.synchronize()
        self._hooked.end_step()
        return [parameter.grad for parameter in parameters]

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """See Reducer.reduce_window."""
        return self._reduce_given(gradients, variables, [variable.value for variable in variables])

    def _reduce_given(
        self, gradients: Sequence[Any], variables: Sequence[Any], parameters: list[torch.nn.Parameter]
    ) -> list[Any]:
        key = tuple(map(id, variables))
        if key not in self._plans:
            self._plans[key] = _GivenGradients(self._settings, name_variables(variables), parameters)
        return self._plans[key].reduce(gradients)

    def agree(self, flag: Any) -> Any:
        """See Reducer.agree."""
        return torch.tensor(self._settings.agree(flag))

    def enter(self) -> None:
        """See Reducer.enter."""
        if self._hooked is not None:
            self._hooked.enter()
            self._hooked.zeroed()  # a backward pass may have been cut short

    def close(self) -> None:
        """See Reducer.close."""
        if self._hooked is not None:
            self._hooked.close()
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()


class _GivenGradients:
    """A plan for gradients that are not the parameters' own."""

    def __init__(self, settings: Settings, names: list[str], parameters: list[torch.nn.Parameter]) -> None:
        self._source = source = TorchSource(list(zip(names, parameters, strict=True)), {})
        self._strategy = TorchAllReduce(settings.options)
        group = settings.group
        name = f"given.{group.engine.count('given')}"

        def attach(_: Transport, __: Sequence[int]) -> None:
            self._strategy.attach(source.describe(name), group)

        collective_step(group.engine, "plan", attach, name=name)

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Reduce gradients, which stay as they are; returns new ones."""
        source, parameters = self._source, self._source.parameters
        kept = [parameter.grad for parameter in parameters]
        source.written.update(index for index, gradient in enumerate(gradients) if gradient is not None)
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.detach().to(parameter.dtype, copy=True)
            self._strategy.before_step()
            source.restore_sparse()
            return [parameter.grad for parameter in parameters]
        finally:
            source.written.clear()
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def close(self) -> None:
        self._strategy.detach()
