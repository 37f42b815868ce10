"""What DistributedOptimizer does with gradients or steps, as its arguments say: strategies of torch's tensors."""

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
    """AllReduce of torch's gradients: those of a GPU in its own memory, where the ranks can use NCCL.

    An engine that reduces torch's gradients one by one takes them without buckets.

    static_graph: do all steps use the same parameters?
    """

    def __init__(self, options: ReduceOptions, *, static_graph: bool = False) -> None:
        super().__init__(options)
        self._static_graph = static_graph

    def _open(self, parameters: Parameters, group: Group) -> GradientReducer:
        current = runtime.runtime("The reduction of gradients")
        if current.provider.native:
            from hvdkit.torch.device_gradients import open_device_reducer

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
    """op=Adasum: every rank steps by its own gradients; all go on from where the Adasum of the ranks' steps leads.

    Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.

    compression: of what is sent. process_set: the ranks whose steps are combined.
    """

    overlaps_backward = False
    loss_op = None

    def __init__(self, compression: type[Compressor], process_set: ProcessSet) -> None:
        self._compression, self._process_set = compression, process_set
        self._name = ""
        self._parameters: list[torch.nn.Parameter] = []
        self._before: list[torch.Tensor] = []  # the parameters' values, while the inner optimizer steps

    def check(self, what: str, dtype: str) -> None:
        check_gradient(what, dtype, adasum=True)

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. Takes the tensors themselves, so that nothing of a GPU is copied to the host here."""
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
    """What the arguments of DistributedOptimizer ask for. Raises ValueError or TypeError as gradient_options does."""
    if op is Adasum and predivide == 1.0:
        wire_of(compression)
        return AdasumSteps(compression, process_set)
    return TorchAllReduce(gradient_options(op, predivide, compression), static_graph=static_graph)
