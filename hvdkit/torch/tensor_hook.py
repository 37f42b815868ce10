"""TensorHook: takes part in each gradient and step of an optimizer, beside its strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvdkit.torch.uncompiled import uncompiled


class TensorHook(Protocol):
    """A GradientHook of torch's tensors that sees each gradient; see GradientSync.set_gradient_hook()."""

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor to add to `parameter.grad` instead of a gradient from backward; None to leave it."""

    def stepped(self, sync: Any) -> None:
        """Called after the step of the GradientSync's optimizer; may be collective."""

    @property
    def weight(self) -> float:
        """The factor of this step's gradients."""


def hook_gradients(held: weakref.ref[Any], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Pass each gradient to the hook before it is accumulated, also the gradients of presently frozen parameters.

    held: the GradientSync.
    """

    def show(gradient: torch.Tensor) -> torch.Tensor | None:
        sync = held()
        return None if sync is None or sync.gradient_hook is None else sync.gradient_hook.gradient(gradient)

    for parameter in parameters:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter refuses new hooks, but keeps old ones
        parameter.register_hook(uncompiled(show))
        parameter.requires_grad_(trained)
