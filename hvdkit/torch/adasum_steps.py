"""The strategy of op=Adasum: each rank takes its own step, and the steps are combined, not the gradients."""

from __future__ import annotations

import torch

from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.reduce_op import Adasum
from hvdkit.engine.request import check_gradient
from hvdkit.engine.strategy import Parameters, Strategy, on_horovod
from hvdkit.torch.asynchronous import grouped_allreduce_async_
from hvdkit.torch.compression import Compressor
from hvdkit.torch.handles import synchronize
from hvdkit.torch.source import TorchSource


class AdasumSteps(Strategy):
    """Every rank steps by its own gradients; all go on from where the Adasum of the ranks' steps leads.

    Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.

    compression: of what is sent. process_set: the ranks whose steps are combined.
    """

    overlaps_backward = False

    def __init__(self, compression: type[Compressor], process_set: ProcessSet) -> None:
        self._compression, self._process_set = compression, process_set
        self._name = ""
        self._parameters: list[torch.nn.Parameter] = []
        self._before: list[torch.Tensor] = []  # the parameters' values, while the inner optimizer steps

    def check(self, what: str, dtype: str) -> None:
        """See Strategy.check."""
        check_gradient(what, dtype, horovod=on_horovod(), adasum=True)

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. Takes the tensors themselves, so that nothing of a GPU is copied to the host here."""
        assert isinstance(parameters.gradients, TorchSource)
        self._name, self._parameters = f"adasum.{parameters.name}", parameters.gradients.parameters

    def before_step(self) -> None:
        """See Strategy.before_step."""
        self._before = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def after_step(self) -> None:
        """See Strategy.after_step."""
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
        """See Strategy.detach."""
        self._parameters = []
