"""Drives a strategy for adapters with tensors as arrays in host memory: TensorFlow, Keras on JAX."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Action
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.one_step import OneStep
from hvdkit.engine.planned.arrays import ArraySource, Targets
from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.step_clock import HostClock
from hvdkit.engine.strategy import Parameters, Strategy
from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buffer import Array, Buffer

_arithmetic = NumpyArithmetic()
CANNOT_WEIGHT = (
    "Gradients of this optimizer are reduced on the GPU or by Horovod's core, where they cannot be weighted by rows. "
    "Set HVDKIT_DEVICE_TRANSPORT=host, and HVDKIT_ENGINE=native."
)


class ArraySync:
    """Drives the strategy of one list of tensors in each step.

    A step: begin(), arrived() for each tensor, in any order and from any thread, finish(); reduce() calls all three.
    Then after_step(). All ranks open it together.

    group: the ranks that train together.
    tensors: the list, in the same order on all ranks.
    strategy: the strategy to drive.
    compute_threads: number of threads that this rank computes with; 0 for the number of its cores.
    values: the parameters' values, (n,) each in the dtype's storage, for a strategy with uses_values.
    Raises PlanMismatchError if the ranks' tensors differ, HorovodInternalError if a rank calls something else, has left
    or has joined.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[TensorSpec],
        strategy: Strategy,
        *,
        compute_threads: int,
        values: Sequence[Array] = (),
    ) -> None:
        self._group, self._strategy, self._begun = group, strategy, False
        #: For adapters with steps from several threads: they call begin(), arrived() and finish() within its part().
        self.one_step = OneStep([tensor.name for tensor in tensors])
        #: Called in each step, once it is set.
        self.gradient_hook: GradientHook | None = None
        self._weight, self._clock = 1.0, HostClock(strategy)
        self._gradients = ArraySource(len(tensors))
        self._values = ArraySource(len(tensors), complete=True)
        name = f"arrays.{group.engine.count('arrays')}"
        self._parameters = Parameters(name, tensors, self._gradients, self._values, compute_threads)
        self._attach(values)

    def _attach(self, values: Sequence[Array]) -> None:
        def attach(_: Transport, __: Sequence[int]) -> None:
            self._strategy.attach(self._parameters, self._group)

        self._put_values(values)
        self._strategy.driver = None  # if attach() raises, the previous list must be attached again too
        collective_step(self._group.engine, "plan", attach, name=self._parameters.name)
        self._values.abandon()
        self._strategy.driver = weakref.ref(self)

    @property
    def _is_attached(self) -> bool:
        """Is the strategy attached to this list, and not to another list?"""
        driver = self._strategy.driver
        return driver is not None and driver() is self

    @property
    def plan(self) -> Plan:
        """The plan by which the strategy sends gradients."""
        return self._gradients.plan

    def begin(self, targets: Targets, values: Sequence[Array] = ()) -> None:
        """Begin a step. targets: overwritten with the results; they may share memory with the gradients.

        Collective if the strategy was attached to another list in between. values: see ArraySync.
        Raises BackwardInterruptedError if the previous step ended after some of its gradients had been sent.
        """
        if self._begun:
            self._strategy.cancel()
        if not self._is_attached:
            self._attach(values)
        self._begun = True
        self._weight = 1.0 if self.gradient_hook is None else self.gradient_hook.begin_step()
        self._gradients.begin(targets)

    def arrived(self, index: int, gradient: Array | None) -> None:
        """Pass a gradient: (n,) in the dtype's storage, or None if this rank has none in this step.

        It is read now or in a later call of the step; the caller must not change it until then.
        """
        if gradient is not None and self._weight != 1.0:
            gradient = _multiply(gradient, self._parameters.tensors[index].dtype, self._weight)
        self._gradients.put(index, gradient)
        if self._strategy.overlaps_backward:
            self._strategy.arrived(index)

    def finish(self, values: Sequence[Array] = ()) -> Collection[int]:
        """Have the strategy complete its work on the gradients, with all results in the targets; collective.

        Returns the indices of the tensors without a gradient on any rank; their targets are unchanged.
        Raises RankLostError, with the tensors concerned, if a rank has ended.
        """
        self._put_values(values)
        try:
            self._strategy.before_step()
            self._begun = False
            unused = self._gradients.finish()
        finally:
            self._gradients.abandon()
            self._values.abandon()
        if self.gradient_hook is not None:
            self.gradient_hook.reduced(self, self._clock.step())
        return unused

    def together(self, kind: str, action: Action, options: Sequence[tuple[str, str]] = ()) -> Any:
        """Implement CollectiveCaller.together()."""
        return collective_step(self._group.engine, kind, action, name=self._parameters.name, options=options)

    def reduce(
        self, gradients: Sequence[Array | None], targets: Targets, values: Sequence[Array] = ()
    ) -> Collection[int]:
        """Process the gradients of a step when all are available; see begin(), arrived() and finish()."""
        self.begin(targets, values)
        for index in reversed(range(len(gradients))):
            self.arrived(index, gradients[index])
        return self.finish(values)

    def after_step(self, values: Sequence[Array], targets: Targets) -> None:
        """Call the strategy after the optimizer's step; collective.

        values: the parameters' values. targets: overwritten with their new values.
        """
        self._change(self._strategy.after_step, values, targets)

    def change_values(self, change: Callable[[], None], values: Sequence[Array], targets: Targets) -> None:
        """Have the strategy change the parameters outside a step, by calling `change`; collective if `change` is.

        values, targets: see after_step(). Without effect if the strategy is not attached to these parameters.
        """
        self._change(change if self._is_attached else lambda: None, values, targets)

    def _change(self, change: Callable[[], None], values: Sequence[Array], targets: Targets) -> None:
        self._values.begin(targets)
        self._put_values(values)
        try:
            change()
            self._values.finish()
        finally:
            self._values.abandon()

    def _put_values(self, values: Sequence[Array]) -> None:
        for index, value in enumerate(values):
            self._values.put(index, value)

    def close(self) -> None:
        """Free the strategy's memory; collective."""
        if self._is_attached:
            self._strategy.driver = None
            self._strategy.detach()


def _multiply(gradient: Array, dtype: str, weight: float) -> Array:
    """Return the gradient times a weight, in new memory. With a weight of 0 the result is 0, even for infinities."""
    if not weight:
        return np.zeros_like(gradient)
    out = np.empty_like(gradient)
    _arithmetic.combine(Buffer(out, dtype), [Buffer(gradient, dtype)], scale=weight)
    return out
