"""Strategies of a user that need no framework: what they do with gradients and parameters goes through sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.engine.groups import Group
from hvdkit.engine.named.submit import do, reduce_options
from hvdkit.engine.planned.source import HostCopies
from hvdkit.engine.reduce_op import Average
from hvdkit.engine.strategy import Parameters, Strategy
from hvdkit.transport.buffer import Buffer


def _average(group: Group, name: str, buffer: Buffer) -> None:
    options = reduce_options([buffer.dtype], Average, 1.0, 1.0, "a strategy")
    do(group, "allreduce", name, [(buffer.dtype, (buffer.count,))], [buffer], options)


class NamedAverage(Strategy):
    """Gradients are averaged by a named operation each, when all of them are there."""

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        self._parameters, self._group = parameters, group
        self._copies = HostCopies(parameters.tensors, parameters.gradients)

    def before_step(self) -> None:
        """See Strategy.before_step."""
        self._copies.read()
        for tensor, buffer in zip(self._parameters.tensors, self._copies.buffers, strict=True):
            _average(self._group, f"{self._parameters.name}.{tensor.name}", buffer)
        self._copies.write()


class LateAverage(NamedAverage):
    """The same inside step()."""

    overlaps_backward = False


class PeriodicAverage(Strategy):
    """Every rank steps by its own gradients; after every `every` steps the parameters are averaged (local SGD)."""

    overlaps_backward = False
    equal_replicas = False

    def __init__(self, every: int) -> None:
        self._every, self._steps = every, 0

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        self._parameters, self._group = parameters, group
        self._copies = HostCopies(parameters.tensors, parameters.values)

    def after_step(self) -> None:
        """See Strategy.after_step."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._copies.read()
            for tensor, buffer in zip(self._parameters.tensors, self._copies.buffers, strict=True):
                _average(self._group, f"{self._parameters.name}.{tensor.name}", buffer)
            self._copies.write()

    def state_dict(self) -> dict[str, Any]:
        """See Strategy.state_dict."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Strategy.load_state_dict."""
        self._steps = state["steps"]
