"""GradientSync calls the strategy of one optimizer: local variables, accumulation windows, loss scaling."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdkit.engine import runtime as engine
from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.groups import Group
from hvdkit.engine.reduce_op import Average
from hvdkit.engine.strategy import Strategy, other_engine
from hvdkit.keras.backends import StrategyDriver, open_driver
from hvdkit.keras.settings import OptimizerSettings

_numbers = itertools.count()
_syncs: weakref.WeakSet[GradientSync] = weakref.WeakSet()


class GradientSync:
    """Drives the strategy of one optimizer: selects its gradients, and the time of their reduction.

    local_layers: layers whose gradients are not reduced.
    scale_local: divide those by the number of ranks, as the average does with the others.
    passes_factor: multiplied with an average over accumulated passes, to make it a sum.
    """

    def __init__(
        self, settings: OptimizerSettings, *, local_layers: Sequence[Any], scale_local: bool, passes_factor: float
    ) -> None:
        self.number = next(_numbers)  # the same on all ranks, which wrap optimizers in the same order
        self.process_set = settings.process_set
        #: The model whose variables are trained, if the user has named it.
        self.model: Any = None
        self._settings, self._size = settings, settings.size
        self._driver: StrategyDriver | None = None
        self._prepared: Sequence[Any] = ()
        self._local_layers, self._scale_local, self._passes_factor = list(local_layers), scale_local, passes_factor
        self._local: set[int] = set()
        self.gradient_hook: GradientHook | None = None
        self._done = False
        self._reduced = False  # whether the strategy has had gradients of the last step or window
        self._variables: Sequence[Any] = ()
        if self.strategy is not None and any(sync.strategy is self.strategy for sync in _syncs):
            raise ValueError(
                f"DistributedOptimizer(): this {type(self.strategy).__name__} object is already the strategy of "
                f"another optimizer. Create one strategy object for each optimizer."
            )
        self.enter()
        _syncs.add(self)

    def enter(self) -> None:
        """Continue among the present ranks of the process set, after init()."""
        if self.process_set.process_set_id is None:  # the set was added after an earlier init()
            return
        self._size = self._settings.size
        if self.strategy is not None and self.process_set.included():
            self.strategy.enter(self.group)
        may_grow = engine.runtime("DistributedOptimizer()").config.elastic and self.process_set.included()
        if self._driver is not None:
            self._driver.enter()
        elif self._size > 1 or may_grow or (self.strategy is not None and self.process_set.included()):
            self._driver = open_driver(self._settings)
            if self.gradient_hook is not None:
                self._driver.set_gradient_hook(self.gradient_hook)
            self.prepare(self._prepared)

    @property
    def strategy(self) -> Strategy | None:
        """The user's own strategy; None without one."""
        return self._settings.strategy

    @property
    def is_traced_with_ranks(self) -> bool:
        """Whether compiled steps contain the number of ranks, and must be compiled anew in another world."""
        local = self._scale_local and bool(self._local or self._local_layers)
        return local or bool(other_engine())

    def add_local(self, variable: Any) -> None:
        """Exclude this variable's gradient from the reduction."""
        self._local.add(id(variable))

    def prepare(self, variables: Sequence[Any]) -> None:
        """Prepare to train these variables without accumulation. TypeError for one that the strategy cannot train."""
        if self._driver is not None:
            self._settings.check(self.shared(variables))
        self._prepared = variables
        if self._driver is not None and variables and not self._local and not self._local_layers:
            self._driver.prepare(variables)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the gradients that are about to be applied; collective, unless an outer optimizer has done so."""
        return self._reduce(gradients, variables)

    def reduce_window(self, gradients: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """Reduce the averages of a window, for the variables of `window_of`; see StrategyDriver.reduce_window."""
        reduced = self._reduce(gradients, self._variables, due)
        if self._passes_factor != 1.0:
            reduced = [None if gradient is None else gradient * self._passes_factor for gradient in reduced]
        return reduced

    def _reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any] | None = None
    ) -> list[Any]:
        result = list(gradients)
        if self._done or self._driver is None:
            return result
        local = self._local_ids()
        shared = [index for index, variable in enumerate(variables) if id(variable) not in local]
        for index, gradient in enumerate(result):
            if id(variables[index]) in local and gradient is not None and self._scale_local:
                result[index] = gradient / self._size
        self._reduced = bool(shared)
        if shared:
            some, theirs = [result[index] for index in shared], [variables[index] for index in shared]
            driver = self._driver
            reduced = driver.reduce(some, theirs) if due is None else driver.reduce_window(some, theirs, due)
            for index, gradient in zip(shared, reduced, strict=True):
                result[index] = gradient
        return result

    @property
    def group(self) -> Group:
        """The ranks that train together, as a group."""
        return self._settings.group

    def set_gradient_hook(self, hook: GradientHook) -> None:
        """Set the object that weights this rank's gradients and sees each step, in place of an earlier one.

        Raises ValueError if the optimizer does not step on an average of weighted gradients.
        """
        problem = (
            "a strategy of its own"
            if self.strategy is not None
            else "an op other than hvd.Average"
            if self._settings.op is not Average
            else "layers whose gradients stay on their rank"
            if self._local or self._local_layers
            else ""
        )
        if problem:
            raise ValueError(f"The optimizer has {problem}, so gradients cannot be weighted by rows.")
        self.gradient_hook = hook
        if self._driver is not None:
            self._driver.set_gradient_hook(hook)

    def attach(self, variables: Sequence[Any]) -> None:
        """Attach the strategy to these variables, unless a step has; collective then. ValueError for an empty list."""
        if self._driver is None or self._size == 1:
            return
        if not variables:
            rank = self.group.transport.rank
            raise ValueError(
                f"Rank {rank} has taken no step, and its optimizer is not built, so the other ranks' first step waits "
                f"for it for ever. Call optimizer.build(model.trainable_variables) on every rank."
            )
        self._driver.attach(self.shared(variables))

    def after_step(self, due: Any) -> None:
        """Notify the strategy of the step if it had the gradients; due: see StrategyDriver."""
        if self._driver is not None and self._reduced:
            self._driver.after_step(due)

    def _local_ids(self) -> set[int]:
        return self._local | {id(variable) for layer in self._local_layers for variable in layer.trainable_variables}

    def shared(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables whose gradients are reduced."""
        local = self._local_ids()
        return [variable for variable in variables if id(variable) not in local]

    def change_values(self, change: Callable[[], None]) -> None:
        """Let the strategy change the variables between two steps; see StrategyDriver.change_values."""
        if self._driver is not None:
            self._driver.change_values(change)

    def agree(self, flag: Any) -> Any:
        """Return whether a scalar bool is true on all ranks; collective, unless it was made of reduced gradients.

        If ranks do not make the same steps, returns this rank's value.
        """
        alone = self.strategy is not None and not self.strategy.lockstep
        return flag if self._done or self._driver is None or alone else self._driver.agree(flag)

    @contextmanager
    def done(self) -> Iterator[None]:
        """Context in which gradients are not reduced, because they have been."""
        before, self._done = self._done, True
        try:
            yield
        finally:
            self._done = before

    @contextmanager
    def window_of(self, variables: Sequence[Any]) -> Iterator[None]:
        """Context that accumulates the gradients of these variables, and reduces them at the end of a window."""
        self._variables = variables
        try:
            yield
        finally:
            self._variables = ()

    def close(self) -> None:
        """Free the memory that the strategy has allocated; collective."""
        if self._driver is not None:
            self._driver.close()


engine.follow(_syncs)
