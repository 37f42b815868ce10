"""The plan of a list of gradients, as the engine wants it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from hvdkit.engine.groups import Group
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.torch.layout import Named
from hvdkit.torch.source import TorchSource


class Plan(Protocol):
    """What reduces one list of gradients again and again; see TorchSource."""

    def arrived(self, index: int) -> None:
        """The gradient of this parameter is complete."""

    def started(self, index: int) -> bool:
        """Has this parameter's gradient been sent? It must not be written to before it is back."""

    @property
    def under_way(self) -> bool:
        """Has anything of the present reduction been sent?"""

    def finish(self) -> None:
        """Wait until every gradient is reduced; one that another rank had and this one had not appears here as well."""

    def drain_and_close(self) -> None:
        """Close the plan while some ranks have joined; collective."""

    def close(self) -> None:
        """Free what it holds; collective."""


def open_plan(
    made: Runtime,
    group: Group,
    name: str,
    named: Named,
    *,
    options: ReduceOptions,
    touched: Set[int],
    groups: Mapping[int, int],
    statistics: Statistics,
) -> Plan:
    """The plan of these parameters' gradients, in buckets or, on Horovod's core, one by one; see TorchSource.

    groups: Horovod's core fuses what is ready together, and needs none. Where that was opened for another framework
    its allreduces take buckets in the host's memory.
    """
    if made.horovod is not None and made.horovod.framework == "torch":
        from hvdkit.torch.direct_gradients import DirectGradients

        return DirectGradients(
            made.horovod, group, name, named, options=options, touched=touched, statistics=statistics
        )
    return TorchSource(made, group, name, named, options=options, touched=touched, groups=groups, statistics=statistics)
