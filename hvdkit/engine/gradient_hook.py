"""The interface of an object that is called in each step of an optimizer, besides its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdkit.engine.named.operation import Action

#: Returns the seconds that a step took; may wait for a GPU.
Seconds = Callable[[], float]


class CollectiveCaller(Protocol):
    """Runs collectives among the ranks of one optimizer."""

    def together(self, kind: str, action: Action, options: Sequence[tuple[str, str]] = ()) -> Any:
        """Run `action` on all ranks of this optimizer; collective. kind, options: see collective_step()."""


class GradientHook(Protocol):
    """Weights the gradients of an optimizer, and is called in each of its steps; set by set_gradient_hook()."""

    def begin_step(self) -> float:
        """Return the factor by which this rank's gradients are multiplied before their reduction.

        Called when the gradients of a step are complete; may be called several times in a step.
        """

    def reduced(self, caller: CollectiveCaller, seconds: Seconds | None) -> None:
        """Called after the gradients of a step are reduced; may be collective.

        seconds: returns this rank's compute time since the last call, without waits for other ranks; None if not
        measured.
        """
