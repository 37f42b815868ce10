"""ComputeClock: measures a rank's computing time in a training step, without its waits for other ranks."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine.gradient_hook import Seconds
from hvdkit.engine.step_clock import HostClock
from hvdkit.engine.strategy import Strategy
from hvdkit.torch.device.accelerator import module_of


class ComputeClock(HostClock):
    """Measures the seconds of each step of one optimizer.

    If gradients go through host memory: from one step's end to the next, minus the waits for other ranks.
    If they stay on a GPU, whose stream waits: from the step's end to the last gradient, by events.

    strategy: of the optimizer; its statistics contain the waits.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._gradient: Any = None  # event after the newest gradient on a GPU
        self._module: Any = None  # torch's module of that GPU, torch.cuda for example
        super().__init__(strategy)

    def restart(self) -> None:
        super().restart()
        self._began = None if self._gradient is None else self._record()
        self._recorded = False  # whether there was a gradient since

    def gradient(self, gradient: torch.Tensor) -> None:
        """Record that backward has computed a gradient."""
        if not gradient.is_cpu:
            self._module = module_of(gradient.device.type)
            self._gradient = self._gradient or self._event()
            self._gradient.record()
            self._recorded = True

    def step(self) -> Seconds | None:
        """Record the end of a step. Returns a function for the seconds since the previous end; it may wait for the GPU.

        Returns None if they are unknown: in the first step on a GPU, and in one without a gradient there.
        """
        began, last = self._began if self._recorded else None, self._gradient
        self._gradient = None if last is None else self._event()
        seconds = super().step()
        if seconds is not None or began is None:
            return seconds
        return lambda: _elapsed_s(began, last)

    def _event(self) -> Any:
        return self._module.Event(enable_timing=True)

    def _record(self) -> Any:
        event = self._event()
        event.record()
        return event


def _elapsed_s(first: Any, last: Any) -> float:
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
