"""Asynchronous steps with bounded staleness: ranks send how their parameters change, and take what is there.

One step of a rank: the inner optimizer steps on the rank's own gradients; the change that it made, divided by the
number of ranks, goes to the servers, which add it to the values that all share; the rank goes on from these. So the
optimizer's state (momentum, Adam's moments) is each rank's own, as in Downpour SGD (J. Dean et al., "Large Scale
Distributed Deep Networks", 2012), and any optimizer of any framework will do.
"""

from __future__ import annotations

import numpy as np

from hvdkit.asynchronous.parameter_server import FINISH, PUSH, ServerLink, slices
from hvdkit.asynchronous.parameter_values import ParameterValues, math_dtype
from hvdkit.asynchronous.staleness import Clocks
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import describe_plan
from hvdkit.engine.strategy import Parameters, Strategy, on_horovod
from hvdkit.transport.buffer import COMPLEX, Array, as_buffer


class Asynchronous(Strategy):
    """Ranks step at their own pace, at most staleness + 1 times while another rank is in one step.

    staleness: 1 or more; scale_by_staleness: see Clocks. servers: on so many first ranks a thread keeps a slice of the
    parameters, in float32 (float64 where a parameter is).
    Raises ValueError for numbers that cannot be used.
    """

    overlaps_backward = False
    equal_replicas = False

    def __init__(self, staleness: int = 4, *, servers: int = 1, scale_by_staleness: bool = False) -> None:
        check_numbers(staleness, servers)
        if staleness == 0:
            raise ValueError("Asynchronous(): staleness is 0; use AllReduce, which is that.")
        self._staleness, self._servers, self._scaled = staleness, servers, scale_by_staleness
        self._values: ParameterValues | None = None
        self._links: list[ServerLink] = []

    def check(self, what: str, dtype: str) -> None:
        """See Strategy.check."""
        super().check(what, dtype)
        if dtype in COMPLEX:
            raise TypeError(f"{what} has dtype {dtype}, which AsynchronousOptimizer() cannot train. Use real numbers.")

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. All ranks go on from rank 0's values."""
        self.detach()
        if on_horovod():
            raise ValueError(
                "AsynchronousOptimizer() needs the native engine: Horovod's core has no messages from rank to rank. "
                "Set HVDKIT_ENGINE=native."
            )
        transport = group.transport
        check_servers(self._servers, transport.size)
        words = f"Asynchronous {self._staleness} {self._servers} {self._scaled}"
        check_agreement(transport, describe_plan(parameters.tensors, 0, words))
        if not parameters.tensors:
            return
        self._tensors, self._size = parameters.tensors, transport.size
        self._values = ParameterValues(parameters.tensors, parameters.values)
        dtypes = {math_dtype(tensor.dtype) for tensor in parameters.tensors}
        count = sum(tensor.count for tensor in parameters.tensors)
        self._before, self._after = (np.empty(count, max(dtypes, default="float32")) for _ in range(2))
        self._read(self._before)
        transport.broadcast(as_buffer(self._before), 0)
        self._write(self._before)
        self._pieces = slices(count, self._servers)
        for root, (start, stop) in enumerate(self._pieces):
            own = transport.split([range(transport.size)])
            assert own is not None
            clocks = Clocks(transport.size, self._staleness, scaled=self._scaled)
            self._links.append(ServerLink(own, root, self._before[start:stop], clocks))

    def _read(self, flat: Array) -> None:
        assert self._values is not None
        at = 0
        for index, tensor in enumerate(self._tensors):
            flat[at : at + tensor.count] = self._values.read(index)
            at += tensor.count

    def _write(self, flat: Array) -> None:
        assert self._values is not None
        at = 0
        for index, tensor in enumerate(self._tensors):
            values = flat[at : at + tensor.count]
            self._values.write(index, values.astype(math_dtype(tensor.dtype), copy=False))
            at += tensor.count

    def before_step(self) -> None:
        """See Strategy.before_step; not collective."""
        if self._values is not None:
            self._read(self._before)

    def after_step(self) -> None:
        """See Strategy.after_step; not collective. Waits if the values of a rank would get too old.

        Raises RankLostError if a rank has ended.
        """
        if self._values is None:
            return
        self._read(self._after)
        np.subtract(self._after, self._before, out=self._after)
        self._after /= self._size
        self._exchange(PUSH)

    def finish(self) -> None:
        """Wait until all ranks call it, and give all of them the same parameters; collective.

        Until then this rank holds nobody back. Steps may follow.
        """
        if self._values is not None:
            self._exchange(FINISH)

    def _exchange(self, kind: float) -> None:
        for link, (start, stop) in zip(self._links, self._pieces, strict=True):
            link.ask(kind, self._after[start:stop] if kind == PUSH else None)
        for link, (start, stop) in zip(self._links, self._pieces, strict=True):
            self._after[start:stop] = link.answer()
        self._write(self._after)

    def detach(self) -> None:
        """See Strategy.detach."""
        links, self._links, self._values = self._links, [], None
        for link in links:
            link.close()


def check_numbers(staleness: int, servers: int) -> None:
    """Raise ValueError or TypeError for numbers that cannot be used with any number of ranks."""
    for name, value, least in (("staleness", staleness, 0), ("servers", servers, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"AsynchronousOptimizer(): {name} is {value!r}; it must be an integer.")
        if value < least:
            raise ValueError(f"AsynchronousOptimizer(): {name} is {value}; it must be {least} or more.")


def check_servers(servers: int, size: int) -> None:
    """Raise ValueError for more servers than ranks."""
    if servers > size:
        raise ValueError(
            f"AsynchronousOptimizer(): servers is {servers}, but there are {size} ranks, and a server is a thread of a "
            f"rank. Use at most servers={size}."
        )
