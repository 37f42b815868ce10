"""What a wrapped optimizer has beside its own class: step() with its strategy, windows, more parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.engine.planned.reducer import Statistics
from hvdkit.torch.plain_copies import PlainCopies
from hvdkit.torch.sync import GradientSync


class Wrapped(PlainCopies):
    """What a wrapped optimizer has beside its own class; mixed in before it."""

    # The defaults are for an instance that a script makes of the class itself: it is a plain optimizer.
    _hvdkit: GradientSync | None = None
    _hvdkit_skip = False
    _hvdkit_synchronized = False

    def synchronize(self) -> None:
        """Reduce gradients that have not been reduced yet. backward() has done so, unless a window was cut short.

        Does nothing with op=Adasum or another strategy that works in step().
        """
        sync = self._hvdkit
        if sync is not None:
            sync.synchronize()
        self._hvdkit_synchronized = sync is None or sync.strategy.overlaps_backward

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() take the gradients as they are; for after synchronize(), which also makes it needless.

        Refused with AssertionError, as in Horovod, with op=Adasum or another strategy that works in step(): without it
        the ranks would drift apart.
        """
        if self._hvdkit is not None and not self._hvdkit.strategy.overlaps_backward:
            raise AssertionError(
                f"skip_synchronize() cannot be used with op=hvd.Adasum or another strategy that communicates inside "
                f"step(); this optimizer has the strategy {type(self._hvdkit.strategy).__name__}. Remove the call."
            )
        self._hvdkit_skip = True
        try:
            yield
        finally:
            self._hvdkit_skip = False

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, between the two halves of its strategy's."""
        sync, synchronized = self._hvdkit, self._hvdkit_synchronized
        self._hvdkit_synchronized = False
        if synchronized and not self._hvdkit_skip and closure is None:
            warnings.warn(
                # Horovod's words, by which scripts and tests filter the warning, up to the first full stop.
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Horovod would reduce the gradients twice. hvdkit reduces them once and needs neither call.",
                stacklevel=3,  # torch.compile's wrapper of this method is between
            )
        if sync is None:
            return self._hvdkit_step(closure, *args, **kwargs)
        closure = sync.begin_step(closure, skip=self._hvdkit_skip)
        result = self._hvdkit_step(closure, *args, **kwargs)
        sync.end_step()
        return result

    def _hvdkit_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """The own class's step."""
        return super().step(closure, *args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own zero_grad; gradients that were accumulated and not reduced are dropped with it."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if self._hvdkit is not None:
            self._hvdkit.zeroed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own; all ranks add the same parameters, before the same step."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._hvdkit is not None:
            self._hvdkit.add(number_parameters(self.param_groups)[-1])  # type: ignore[attr-defined]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after so many backward passes from the next window on, as Horovod's; every rank says the same.

        Raises ValueError for less than 1.
        """
        if passes < 1:
            raise ValueError(f"set_backward_passes_per_step(): the number of passes is {passes}; it must be 1 or more.")
        if self._hvdkit is not None:
            self._hvdkit.set_passes(passes)

    def reduction_statistics(self) -> Statistics:
        """How much was reduced, how long that took, and how much of it training had to wait for."""
        return Statistics() if self._hvdkit is None else self._hvdkit.strategy.statistics


# torch puts its step hooks around step() of each class that it does not find this mark on; the wrapped class has them.
Wrapped.step.hooked = True  # type: ignore[attr-defined]


def number_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """(name, parameter) for each parameter of each group; the name says where it is."""
    return [
        [(f"group.{at}.{index}", parameter) for index, parameter in enumerate(group["params"])]
        for at, group in enumerate(param_groups)
    ]
