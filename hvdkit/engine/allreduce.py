"""The strategy of data parallel training: gradients are reduced over all ranks before the optimizer uses them."""

from __future__ import annotations

from typing import Protocol

from hvdkit.engine import runtime
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import Plan
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.strategy import Parameters, Strategy
from hvdkit.engine.tuning.start import choose_settings, start_tuner
from hvdkit.errors import BackwardInterruptedError, HorovodInternalError


class GradientReducer(Protocol):
    """Reduces one list of gradients in each round; see BucketReducer."""

    @property
    def under_way(self) -> bool: ...
    def arrived(self, tensor: int, /) -> None: ...
    def started(self, tensor: int, /) -> bool: ...
    def check(self) -> None: ...
    def forget_arrivals(self) -> None: ...
    def finish(self) -> None: ...
    def drain_and_close(self) -> None: ...
    def close(self) -> None: ...


class AllReduce(Strategy):
    """Averages or sums gradients in buckets, while backward computes the gradients of earlier layers.

    If no rank has a gradient of a parameter, its gradient is not changed; if only other ranks have one, this rank gets
    theirs. options: average or sum, and the wire dtype or coding between hosts.
    """

    def __init__(self, options: ReduceOptions | None = None) -> None:
        self.options = options if options is not None else ReduceOptions()
        self.repeatable = self.options.average
        self._statistics = Statistics()
        self._parameters: Parameters | None = None
        self._reducer: GradientReducer | None = None  # also None without parameters
        self._arrived: set[int] = set()  # since the last before_step()

    @property
    def loss_op(self) -> ReduceOp:
        return Average if self.options.average else Sum

    @property
    def statistics(self) -> Statistics:
        return self._statistics

    def attach(self, parameters: Parameters, group: Group) -> None:
        if self._reducer is not None:
            self._release_memory()
            self._reducer.drain_and_close()  # ranks that have joined may have begun a zero round
            self._reducer = None
        self._arrived.clear()
        self._parameters = parameters
        if parameters.tensors:
            self._reducer = self._open(parameters, group)

    def _open(self, parameters: Parameters, group: Group) -> GradientReducer:
        """Open a reducer for the gradients of one or more parameters, with this job's settings; collective.

        Raises PlanMismatchError if the ranks' parameters differ, ConfigError for a file of tuned settings that
        cannot be read.
        """
        current, options = runtime.runtime("a reduction of gradients"), self.options
        name, tensors, source = parameters.name, parameters.tensors, parameters.gradients
        current.plans += 1
        settings, key = choose_settings(current, group, name, tensors, options)
        spare_core = has_spare_core(current.cores, parameters.compute_threads)
        context = Context(group.transport, name, group.engine, current.timeline, spare_core)
        statistics = self._statistics
        reducer = BucketReducer(context, tensors, source, options=options, settings=settings, statistics=statistics)
        if key is not None:
            start_tuner(reducer, current.config, settings, key, options)
        return reducer

    def arrived(self, index: int) -> None:
        """Implement Strategy.arrived(): start the buckets that are complete."""
        reducer = self._reducer
        assert reducer is not None
        if index not in self._arrived:
            self._arrived.add(index)
            reducer.arrived(index)
        elif reducer.started(index):
            reducer.check()
            assert self._parameters is not None
            raise HorovodInternalError(
                f"The gradient of {self._parameters.tensors[index].name} was written again after its reduction had "
                "started. If an earlier backward() raised an exception that the script caught, let that exception "
                "end the job. If the parameter is used both inside and outside of a re-entrant checkpoint, pass "
                "use_reentrant=False to torch.utils.checkpoint.checkpoint()."
            )

    def cancel(self) -> None:
        if self._reducer is not None:
            self._reducer.check()
            if self._reducer.under_way:
                raise BackwardInterruptedError(
                    "backward() raised an exception on this rank after some of its gradients had been sent, and the "
                    "other ranks wait for the rest. Let the exception end the job. To skip a batch, decide it before "
                    "backward() (from the loss, for example) and on all ranks."
                )
            self._reducer.forget_arrivals()
        self._arrived.clear()

    def before_step(self) -> None:
        """See Strategy.before_step. Raises RankLostError, with the parameters concerned, if a rank has ended."""
        self._arrived.clear()
        if self._reducer is not None:
            self._reducer.finish()

    def detach(self) -> None:
        self._arrived.clear()
        if self._reducer is not None:
            self._release_memory()
            self._reducer.close()
            self._reducer = None

    def _release_memory(self) -> None:
        """Make the source drop its views of the buckets, because their memory stays mapped as long as a view exists."""
        if self._parameters is not None:
            self._parameters.gradients.on_plan(Plan((), ()))
