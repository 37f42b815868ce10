"""Take part in each gradient and step of an optimizer, beside its strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvdkit.torch.uncompiled import uncompiled


class TensorHook(Protocol):
    """As GradientHook, of torch's tensors: it sees each gradient; see GradientSync.set_gradient_hook()."""

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What is added to `parameter.grad` in place of a gradient that backward has computed; None for itself."""

    def stepped(self, sync: Any) -> None:
        """The optimizer of the GradientSync has stepped; may be collective."""

    @property
    def weight(self) -> float:
        """What gradients are multiplied with in this step."""


def hook_gradients(held: weakref.ref[Any], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Pass each gradient to the hook before it is accumulated, also those of parameters that are frozen now.

    held: the GradientSync.
    """

    def show(gradient: torch.Tensor) -> torch.Tensor | None:
        sync = held()
        return None if sync is None or sync.gradient_hook is None else sync.gradient_hook.gradient(gradient)

    for parameter in parameters:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a hook is refused otherwise, and kept afterwards
        parameter.register_hook(uncompiled(show))
        parameter.requires_grad_(trained)
