"""Take part in each gradient and step of an optimizer, beside its strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvdkit.torch.uncompiled import uncompiled


class Follower(Protocol):
    """See GradientSync.follow()."""

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What is added to `parameter.grad` in place of a gradient that backward has computed; None for itself."""

    def stepped(self, sync: Any) -> None:
        """The optimizer of the GradientSync has stepped; may be collective."""


def hook_gradients(held: weakref.ref[Any], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Show each gradient to the follower before it is accumulated, also those of parameters that are frozen now.

    held: the GradientSync.
    """

    def show(gradient: torch.Tensor) -> torch.Tensor | None:
        sync = held()
        return None if sync is None or sync.follower is None else sync.follower.gradient(gradient)

    for parameter in parameters:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a hook is refused otherwise, and kept afterwards
        parameter.register_hook(uncompiled(show))
        parameter.requires_grad_(trained)
