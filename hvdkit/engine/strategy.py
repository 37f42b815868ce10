"""The interface between a wrapped optimizer and its synchronization: averaged gradients, averaged steps, ...

An adapter (GradientSync of each framework) drives one strategy. One step of the training is, on every rank,

    attach                     before the first step, and again when parameters, ranks or the world change
    arrived, arrived, ...      in the last backward pass of an accumulation window, as gradients become complete
    before_step                all gradients of the window are complete
      the user clips or unscales gradients, then the inner optimizer steps
    after_step

Every rank makes the calls that are marked collective in the same order. Parameters are known by their index in
`Parameters.tensors`; their numbers are read and written through a TensorSource, so a strategy that uses nothing else
works with every framework.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.engine import runtime
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.planned.source import OwnTensors, TensorSource
from hvdkit.engine.reduce_op import Average, ReduceOp
from hvdkit.engine.request import check_gradient


@dataclass(frozen=True)
class Parameters:
    """The parameters that one optimizer trains, as a strategy sees them. A source has one plan at a time.

    name: of the optimizer, the same on all ranks.
    tensors: name, number of elements, dtype, device, memory layout and shape of each parameter, in one order on all
        ranks.
    gradients: copies the parameters' gradients into buckets and back.
    values: copies the parameters' values into buckets and back.
    compute_threads: number of threads that this rank computes with; 0 for the number of its cores.
    own: the framework's own tensors; None where the adapter passes arrays.
    """

    name: str
    tensors: Sequence[TensorSpec]
    gradients: TensorSource
    values: TensorSource
    compute_threads: int = 0
    own: OwnTensors | None = None

    def own_tensors(self, who: str) -> OwnTensors:
        """Return the framework's own tensors. Raises TypeError where the adapter passes arrays.

        who: the object that needs the tensors, for the message.
        """
        if self.own is None:
            raise TypeError(
                f"{who} works on tensors of a framework, but {self.name} has arrays in their place, as on TensorFlow "
                "and JAX. Use it with PyTorch, or have it read and write Parameters.gradients and .values."
            )
        return self.own


class Strategy:
    """Processes the gradients and parameters of one optimizer, besides the optimizer's own step.

    A subclass overrides the calls that it needs; here they do nothing. An object serves one optimizer.
    """

    #: Does it work on gradients while backward runs? Then arrived() is called, and before_step() at the end of a
    #: window's last backward pass, so that clipping sees its result. Otherwise step() calls before_step(), immediately
    #: before the inner optimizer steps; clipping sees the rank's own gradients then, and the strategy cannot be used
    #: with GradScaler, which may skip the step on one rank.
    overlaps_backward: bool = True
    #: May before_step() be called again before a step, for gradients that it has already processed? An average of
    #: averages is the average; a sum of sums is not the sum. If False, a second window before step() is an error.
    repeatable: bool = True
    #: Are the parameters of all ranks equal after each after_step()? Then HVDKIT_CHECK_REPLICAS compares them.
    equal_replicas: bool = True
    #: Do all ranks take every step together? If not, a step may contain no collective call.
    lockstep: bool = True
    #: Does it read or write the parameters' values? Then adapters with compiled steps pass the values, and call
    #: after_step(). True in a class that defines after_step(), unless the class sets it to another value.
    uses_values: bool = False
    #: The object that drives it, for the parameters that it is attached to; set by drivers. A user's own strategy may
    #: be attached to several lists of parameters, in turn.
    driver: weakref.ref[Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "after_step" in cls.__dict__ and "uses_values" not in cls.__dict__:
            cls.uses_values = True

    @property
    def loss_op(self) -> ReduceOp | None:
        """The operation that reduces the loss of a closure (torch) over all ranks; None to keep each rank's own loss.

        It is the gradients' operation: average or sum. None if ranks step by their own gradients, or do not wait for
        each other.
        """
        return Average if self.equal_replicas else None

    @property
    def statistics(self) -> Statistics:
        """The amount of data that was reduced, and the time that this took."""
        return Statistics()

    def check(self, what: str, dtype: str) -> None:
        """Raise TypeError for a parameter of this dtype, described by `what`, that the strategy cannot train.

        Called when an optimizer is wrapped, and when parameters are added or unfrozen; not collective.
        """
        check_gradient(what, dtype, engine=other_engine())

    def enter(self, group: Group) -> None:
        """Take note of the ranks that will train together; not collective.

        Called when an optimizer is wrapped, and after an init().
        """

    def attach(self, parameters: Parameters, group: Group) -> None:
        """Agree with the other ranks on the parameters and allocate what the strategy needs; collective.

        Called before the first before_step(); between windows when parameters were added or unfrozen, with old and new
        parameters in `parameters`; and after shutdown() and init(), with the ranks of the new world. The name of a
        parameter identifies its state in the next attach(). The call runs as one operation of the engine, also on ranks
        that have joined: it may use the collectives of group.transport, and must not wait for operations of
        group.engine.
        Raises PlanMismatchError if the ranks' parameters differ.
        """

    def arrived(self, index: int) -> None:
        """Take note that the gradient of this parameter is complete on this rank. Not collective.

        Called inside backward, from the thread of the parameter's device, in any order, and only in the last pass of a
        window; not for parameters without a gradient, nor for gradients that were set by hand or belong to a window
        that step() has ended early. A second call means that the gradient was written again (a re-entrant checkpoint
        inside the pass): the strategy takes the new numbers or, if it has sent the old numbers, raises
        HorovodInternalError. On TensorFlow and JAX it is also called for a parameter without a gradient on this rank in
        the step; TensorSource.fill reports that then.
        """

    def cancel(self) -> None:
        """Discard the arrivals since the last before_step(): a backward pass ended with an exception. Not collective.

        Raises BackwardInterruptedError if some gradients have been sent, because the other ranks wait for the rest.
        """

    def before_step(self) -> None:
        """Turn the gradients into those that the inner optimizer uses; collective.

        Called once a window, also on a rank on which nothing has arrived, and more often only if `repeatable` allows.
        If parameters were added, it is called for the old parameters, then attach(), then again for the new ones.
        TensorSource.fill reports gradients that were not written since the last call as unused on this rank.
        A rank that has joined does not call it: planned reductions and named operations go on without it.
        """

    def after_step(self) -> None:
        """Called after the inner optimizer has stepped; collective. It may change parameters."""

    def detach(self) -> None:
        """Free what attach() has allocated; collective. attach() may follow. Other state is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to continue after a restart: numbers, strings, arrays. Not collective.

        The user saves it with the optimizer's own state, on each rank.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what state_dict() returned on this rank; before or after attach(). Not collective.

        Raises ValueError for the state of another kind of strategy.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict() got {', '.join(map(str, state))}, but this strategy "
                "has no state. The state was saved by another strategy."
            )


def other_engine() -> str:
    """Return the title of the engine; "" for hvdkit's own. Raises NotInitializedError before init()."""
    provider = runtime.runtime("DistributedOptimizer()").provider
    return "" if provider.native else provider.title


def refuse_contradictions(strategy: Strategy, others: Mapping[str, bool]) -> None:
    """Raise TypeError for an object that is no Strategy, ValueError for arguments that contradict the strategy.

    others: names of other arguments that select how gradients are reduced -> was the argument given?
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy is {strategy!r}; pass an object of a subclass of Strategy.")
    arguments = [name for name, is_given in others.items() if is_given]
    if arguments:
        raise ValueError(
            f"strategy={type(strategy).__name__} cannot be combined with {', '.join(arguments)}, because the "
            "strategy decides how gradients are reduced. Leave out one or the other."
        )
