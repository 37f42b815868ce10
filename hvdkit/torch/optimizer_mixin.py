"""The mixin that DistributedOptimizer adds to the user's optimizer class: step(), windows, more parameters."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.engine.planned.reducer import Statistics
from hvdkit.torch.picklable_as_plain import PicklableAsPlain
from hvdkit.torch.sync import GradientSync


class DistributedOptimizerMixin(PicklableAsPlain):
    """Mixin of wrapped optimizers; its methods precede those of the optimizer's own class."""

    # Defaults for an instance that a script makes of the class itself, which is a plain optimizer.
    _hvdkit: GradientSync | None = None
    _hvdkit_skip = False
    _hvdkit_synchronized = False
    _hvdkit_known: KnownGroups

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
        """Let step() take the gradients as they are, after synchronize(); hvdkit needs neither call.

        Raises AssertionError, as in Horovod, with op=Adasum or another strategy that works in step(): without the
        strategy the ranks would drift apart.
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
        """Make the optimizer's own step, between the two halves of its strategy's.

        Raises ValueError if param_groups has parameters that were added by hand: their gradients are not reduced.
        """
        sync, synchronized = self._hvdkit, self._hvdkit_synchronized
        self._hvdkit_synchronized = False
        if synchronized and not self._hvdkit_skip and closure is None:
            warnings.warn(
                # Horovod's words up to the first full stop, because scripts and tests filter the warning by them.
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Horovod would reduce the gradients twice. hvdkit reduces them once and needs neither call.",
                stacklevel=3,  # the frame of torch.compile's wrapper is between
            )
        if sync is None:
            return self._hvdkit_step(closure, *args, **kwargs)
        self._hvdkit_known.check(self.param_groups, sync)  # type: ignore[attr-defined]
        closure = sync.begin_step(closure, skip=self._hvdkit_skip)
        result = self._hvdkit_step(closure, *args, **kwargs)
        sync.end_step()
        return result

    def _hvdkit_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Make the step of the optimizer's own class."""
        return super().step(closure, *args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call the optimizer's own zero_grad, and drop accumulated gradients that were not reduced."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if self._hvdkit is not None:
            self._hvdkit.zeroed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the optimizer's own method; all ranks add the same parameters, before the same step."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._hvdkit is not None:
            self._hvdkit.add(number_parameters(self.param_groups)[-1])  # type: ignore[attr-defined]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after this number of backward passes from the next window on, as in Horovod; the same on every rank.

        Raises ValueError for less than 1.
        """
        if passes < 1:
            raise ValueError(f"set_backward_passes_per_step(): the number of passes is {passes}; it must be 1 or more.")
        if self._hvdkit is not None:
            self._hvdkit.set_passes(passes)

    def reduction_statistics(self) -> Statistics:
        """Return how much was reduced, how long that took, and how much of it training waited for."""
        return Statistics() if self._hvdkit is None else self._hvdkit.strategy.statistics


# torch wraps step() of each class without this mark in its step hooks; the wrapped class already has them.
DistributedOptimizerMixin.step.hooked = True  # type: ignore[attr-defined]


def number_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Return (name, parameter) for each parameter of each group; the name contains both indices."""
    return [
        [(f"group.{at}.{index}", parameter) for index, parameter in enumerate(group["params"])]
        for at, group in enumerate(param_groups)
    ]


class KnownGroups:
    """The already checked lists of parameters in param_groups, compared by identity in each step."""

    def __init__(self) -> None:
        self._known: list[list[torch.nn.Parameter]] = []

    def check(self, param_groups: Sequence[Mapping[str, Any]], sync: GradientSync) -> None:
        """Raise ValueError for a trained parameter of the groups that was not added to `sync`."""
        groups = [group["params"] for group in param_groups]
        if len(groups) == len(self._known) and all(map(_are_same, groups, self._known)):
            return
        given = set(map(id, sync.parameters))
        unknown = [(at, index) for at, group in enumerate(groups) for index in _unknown_in(group, given)]
        for at, index in unknown:
            if groups[at][index].requires_grad:
                raise ValueError(
                    f'optimizer.step(): param_groups[{at}]["params"][{index}], of shape '
                    f"{tuple(groups[at][index].shape)}, was put there after the optimizer was wrapped, so its gradient "
                    "is not reduced and the ranks would drift apart. Pass new parameters to "
                    "optimizer.add_param_group() on all ranks, or replace layers of the model before "
                    "hvd.DistributedOptimizer()."
                )
        self._known = [] if unknown else [list(group) for group in groups]  # frozen parameters may be trained later


def _are_same(one: Sequence[torch.nn.Parameter], other: Sequence[torch.nn.Parameter]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _unknown_in(group: Sequence[torch.nn.Parameter], known: Collection[int]) -> list[int]:
    return [index for index, parameter in enumerate(group) if id(parameter) not in known]
