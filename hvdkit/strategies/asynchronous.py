"""Asynchronous steps with bounded staleness: ranks send changes of parameters, and get the servers' present values.

In a step of a rank the inner optimizer steps on the rank's own gradients. The rank sends the resulting change, divided
by the number of ranks, to the servers, which add it to the shared values. The rank continues from these. So each rank
has its own optimizer state (momentum, Adam's moments), as in Downpour SGD (J. Dean et al., "Large Scale
Distributed Deep Networks", 2012), and any optimizer of any framework is possible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hvdkit.engine.api import Array, FlatValues, Group, Parameters, ProcessSet, as_buffer, check_process_set, runtime
from hvdkit.log import logger
from hvdkit.strategies.arguments import check_integer, refuse_arguments
from hvdkit.strategies.served import ParameterServerStrategy
from hvdkit.strategies.server import FINISH, PUSH, Answer
from hvdkit.strategies.staleness import StalenessClock

_WHO = "AsynchronousOptimizer()"


class ParameterShard:
    """The RequestHandler that keeps a slice of the parameters, and adds the changes that ranks send to it.

    start: the first values (n,), copied.
    """

    def __init__(self, start: Array, clocks: StalenessClock) -> None:
        self._values, self._clocks = start.copy(), clocks

    def take(self, rank: int, kind: float, numbers: Array) -> None:
        if kind == FINISH:
            self._clocks.finish(rank)
            return
        factor = self._clocks.push(rank)
        self._values += numbers if factor == 1.0 else factor * numbers

    def answers(self, waiting: Collection[int]) -> Mapping[int, Answer]:
        return dict.fromkeys(self._clocks.pop_released(waiting), Answer(self._values))


class Asynchronous(ParameterServerStrategy):
    """Strategy in which ranks step at their own pace: at most staleness + 1 steps during one step of another rank.

    staleness: 1 or more; see StalenessClock.
    servers: number of servers; each of the first ranks runs a server thread, which keeps a slice of the parameters, in
    float32 (float64 if a parameter has it).
    scale_by_staleness: see StalenessClock.

    Raises ValueError for invalid numbers.
    """

    who = _WHO
    overlaps_backward = False
    equal_replicas = False
    lockstep = False

    def __init__(self, staleness: int = 4, *, servers: int = 1, scale_by_staleness: bool = False) -> None:
        super().__init__()
        _check_numbers(staleness, servers)
        if staleness == 0:
            raise ValueError("Asynchronous(): staleness is 0; use AllReduce, which is that.")
        self._staleness, self._servers, self._scaled = staleness, servers, scale_by_staleness
        self._values: FlatValues | None = None

    def describe(self, size: int) -> str:
        _check_servers(self._servers, size)
        return f"Asynchronous {self._staleness} {self._servers} {self._scaled}"

    def open(self, parameters: Parameters, group: Group) -> None:
        """Open the servers with rank 0's values, which all ranks have after their next step; collective."""
        transport = group.transport
        self._size = transport.size
        self._values = values = FlatValues(parameters.tensors, parameters.values)
        self._before, self._after = (np.empty(values.count, values.dtype) for _ in range(2))
        values.read(self._before)
        transport.broadcast(as_buffer(self._before), 0)
        self._pieces = slices(values.count, self._servers)
        for root, (start, stop) in enumerate(self._pieces):
            clocks = StalenessClock(transport.size, self._staleness, scaled=self._scaled)
            shared = ParameterShard(self._before[start:stop], clocks)
            self.open_server(group, root, stop - start, values.dtype, shared)

    def before_step(self) -> None:
        """See Strategy.before_step; not collective."""
        if self._values is not None:
            self._values.read(self._before)

    def after_step(self) -> None:
        """See Strategy.after_step; not collective. Waits while the values of a rank would become too old.

        Raises RankLostError if a rank has ended.
        """
        if self._values is None:
            return
        self._values.read(self._after)
        np.subtract(self._after, self._before, out=self._after)
        self._after /= self._size
        self._exchange(PUSH)

    def finish(self) -> None:
        """Wait until all ranks call it, and set the same parameters on all of them; collective.

        Meanwhile other ranks do not wait for this one. Steps may follow.
        """
        if self._values is not None:
            self._values.read(self._after)  # required before each write
            self._exchange(FINISH)

    def _exchange(self, kind: float) -> None:
        assert self._values is not None
        for link, (start, stop) in zip(self._links, self._pieces, strict=True):
            link.ask(kind, self._after[start:stop] if kind == PUSH else None)
        for link, (start, stop) in zip(self._links, self._pieces, strict=True):
            self._after[start:stop] = link.answer().numbers
        self._values.write(self._after)

    def detach(self) -> None:
        self._values = None
        super().detach()


def slices(count: int, servers: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each server's elements."""
    return [(at * count // servers, (at + 1) * count // servers) for at in range(servers)]


def choose_asynchronous(
    staleness: int, servers: int, *, scaled: bool, process_set: ProcessSet, others: Collection[str]
) -> Asynchronous | None:
    """Return the strategy for the arguments of AsynchronousOptimizer(); None for AllReduce.

    staleness, servers: as for Asynchronous.
    scaled: scale_by_staleness.
    process_set: the ranks that train together.
    others: names of unsupported arguments.

    Raises ValueError or TypeError for invalid arguments.
    """
    refuse_arguments(_WHO, others)
    check_process_set(process_set, _WHO)
    _check_numbers(staleness, servers)
    runtime(_WHO)
    if not process_set.included():
        return None
    size = process_set.size()
    _check_servers(servers, size)
    if size == 1:
        logger.warning("hvd.AsynchronousOptimizer: there is one rank, which trains as without hvdkit.")
    if size == 1 or not staleness:
        return None
    return Asynchronous(staleness, servers=servers, scale_by_staleness=scaled)


def _check_numbers(staleness: int, servers: int) -> None:
    """Raise ValueError or TypeError for numbers that are invalid with any number of ranks."""
    check_integer(_WHO, "staleness", staleness, 0)
    check_integer(_WHO, "servers", servers, 1)


def _check_servers(servers: int, size: int) -> None:
    """Raise ValueError for more servers than ranks."""
    if servers > size:
        raise ValueError(
            f"{_WHO}: servers is {servers}, but there are {size} ranks, and a server is a thread of a rank. Use at "
            f"most servers={size}."
        )
