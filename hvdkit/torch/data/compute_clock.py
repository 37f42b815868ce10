"""The time that a rank computes in a training step, without its waits for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hvdkit.engine.strategy import Strategy


class ComputeClock:
    """Takes the seconds of each step of one optimizer.

    Where gradients go through the host's memory: from one step's end to the next, less the waits for other ranks.
    Where they stay on a GPU, whose stream does the waiting: from the step's end to the last gradient, by events.

    strategy: of the optimizer; its statistics have the waits.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._gradient: Any = None  # event behind the newest gradient on a GPU
        self._begin()

    def restart(self) -> None:
        """The step begins only here."""
        self._begin()

    def _begin(self) -> None:
        self._began_s, self._waited_s = time.perf_counter(), self._strategy.statistics.waited_s
        self._began = None if self._gradient is None else _record()
        self._recorded = False  # is there a gradient since?

    def gradient(self, gradient: torch.Tensor) -> None:
        """Backward has computed a gradient."""
        if gradient.is_cuda:
            self._gradient = self._gradient or _event()
            self._gradient.record()
            self._recorded = True

    def step(self) -> Callable[[], float] | None:
        """The optimizer has stepped. Returns what reads the seconds since it did before, and may wait for the GPU.

        None where they are not known: in the first step on a GPU, and in one without a gradient there.
        """
        seconds = time.perf_counter() - self._began_s
        waits, before = self._strategy.statistics.waited_s, self._waited_s
        began, last = self._began if self._recorded else None, self._gradient
        self._gradient = None if last is None else _event()
        self._begin()
        if waits is not None:
            own_s = seconds - (waits - (before or 0.0))
            return lambda: own_s
        return None if began is None else lambda: _elapsed_s(began, last)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _record() -> Any:
    event = _event()
    event.record()
    return event


def _elapsed_s(first: Any, last: Any) -> float:
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
