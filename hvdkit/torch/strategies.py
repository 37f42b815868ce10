"""The strategies of DistributedOptimizer for torch's tensors, and the choice among them by its arguments."""

from __future__ import annotations

from typing import Any, cast

import torch

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce, GradientReducer
from hvdkit.engine.compression import wire_of
from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.reduce_op import Adasum, ReduceOp
from hvdkit.engine.request import ReduceOptions, check_gradient, gradient_options
from hvdkit.engine.strategy import Parameters, Strategy
from hvdkit.torch.compression import Compressor
from hvdkit.torch.handles import synchronize
from hvdkit.torch.reduce import grouped_allreduce_async_


class TorchAllReduce(AllReduce):
    """AllReduce for torch's gradients; those of a GPU are reduced in GPU memory if the ranks can use NCCL.

    An engine that reduces each gradient by itself gets the gradients without buckets.

    static_graph: every step uses the same parameters.
    """

    def __init__(self, options: ReduceOptions, *, static_graph: bool = False) -> None:
        super().__init__(options)
        self._static_graph = static_graph

    def _open(self, parameters: Parameters, group: Group) -> GradientReducer:
        current = runtime.runtime("The reduction of gradients")
        if current.provider.native:
            from hvdkit.torch.device.gradients import open_device_reducer

            reducer = open_device_reducer(
                current, parameters, group, self.options, self.statistics, static=self._static_graph
            )
            if reducer is not None:
                return reducer
        direct = current.provider.gradients_of("torch")
        if direct is None:
            return super()._open(parameters, group)
        reducer = direct(group, parameters, self.options, self.statistics)
        return cast(GradientReducer, reducer)


class AdasumSteps(Strategy):
    """op=Adasum: each rank steps on its own gradients; then all apply the Adasum of the ranks' steps.

    Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.

    compression: of the steps that are sent. process_set: the ranks whose steps are combined.
    """

    overlaps_backward = False
    loss_op = None

    def __init__(self, compression: type[Compressor], process_set: ProcessSet) -> None:
        self._compression, self._process_set = compression, process_set
        self._name = ""
        self._parameters: list[torch.nn.Parameter] = []
        self._before: list[torch.Tensor] = []  # parameter values before the inner optimizer's step

    def check(self, what: str, dtype: str) -> None:
        check_gradient(what, dtype, adasum=True)

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. Keeps the tensors themselves, so that no GPU memory is copied to the host here."""
        self._name = f"adasum.{parameters.name}"
        self._parameters = list(parameters.own_tensors("op=hvd.Adasum").parameters)

    def before_step(self) -> None:
        self._before = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def after_step(self) -> None:
        before, self._before = self._before, []
        changes = [parameter.detach() - start for parameter, start in zip(self._parameters, before, strict=True)]
        combined = self._combine(changes)
        for parameter, start, change in zip(self._parameters, before, combined, strict=True):
            parameter.copy_(start.add_(change))

    def _combine(self, changes: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = [self._compression.compress(change) for change in changes]
        handles = []
        for dtype in dict.fromkeys(small.dtype for small, _ in pairs):
            group = [small for small, _ in pairs if small.dtype == dtype]
            name = f"{self._name}.{dtype}"
            handles.append(grouped_allreduce_async_(group, name=name, op=Adasum, process_set=self._process_set))
        for handle in handles:
            synchronize(handle)
        return [self._compression.decompress(small, context) for small, context in pairs]

    def detach(self) -> None:
        self._parameters = []


def choose_strategy(
    op: ReduceOp, predivide: float, compression: Any, process_set: ProcessSet, *, static_graph: bool = False
) -> Strategy:
    """Return the strategy for these arguments. Raises ValueError or TypeError as gradient_options does.

    op: of the reduction.
    predivide: DistributedOptimizer's gradient_predivide_factor.
    compression: DistributedOptimizer's.
    process_set: the ranks that train together.
    static_graph: every step uses the same parameters.
    """
    if op is Adasum and predivide == 1.0:
        wire_of(compression)
        return AdasumSteps(compression, process_set)
    return TorchAllReduce(gradient_options(op, predivide, compression), static_graph=static_graph)
