"""Strategies of a user that need no framework: what they do with gradients and parameters goes through sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.engine.api import (
    Average,
    Buffer,
    Group,
    Parameters,
    ParameterValues,
    Strategy,
    as_buffer,
    do,
    reduce_options,
)


def _average(group: Group, name: str, buffer: Buffer) -> None:
    options = reduce_options([buffer.dtype], Average, 1.0, 1.0, "a strategy")
    do(group, "allreduce", name, [(buffer.dtype, (buffer.count,))], [buffer], options)


def _average_all(group: Group, parameters: Parameters, values: ParameterValues) -> None:
    for index, tensor in enumerate(parameters.tensors):
        array = values.read(index)
        _average(group, f"{parameters.name}.{tensor.name}", as_buffer(array))
        values.write(index, array)


class NamedAverage(Strategy):
    """Gradients are averaged by a named operation each, when all of them are there."""

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        self._parameters, self._group = parameters, group
        self._gradients = ParameterValues(parameters.tensors, parameters.gradients)

    def before_step(self) -> None:
        """See Strategy.before_step."""
        _average_all(self._group, self._parameters, self._gradients)


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
        self._values = ParameterValues(parameters.tensors, parameters.values)

    def after_step(self) -> None:
        """See Strategy.after_step."""
        self._steps += 1
        if self._steps % self._every == 0:
            _average_all(self._group, self._parameters, self._values)

    def state_dict(self) -> dict[str, Any]:
        """See Strategy.state_dict."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Strategy.load_state_dict."""
        self._steps = state["steps"]
