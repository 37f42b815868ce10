"""Asynchronous steps with bounded staleness: ranks send how their parameters change, and take what is there.

One step of a rank: the inner optimizer steps on the rank's own gradients; the change that it made, divided by the
number of ranks, goes to the servers, which add it to the values that all share; the rank goes on from these. So the
optimizer's state (momentum, Adam's moments) is each rank's own, as in Downpour SGD (J. Dean et al., "Large Scale
Distributed Deep Networks", 2012), and any optimizer of any framework will do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hvdkit.asynchronous.arguments import (
    allow_join,
    check_integer,
    check_real,
    need_messages,
    refuse_arguments,
    refuse_join,
)
from hvdkit.asynchronous.parameter_values import FlatValues
from hvdkit.asynchronous.server import FINISH, PUSH, Answer, ServerLink
from hvdkit.asynchronous.staleness import Clocks
from hvdkit.engine.groups import Group, ProcessSet, check_process_set
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import describe_plan
from hvdkit.engine.strategy import Parameters, Strategy
from hvdkit.log import logger
from hvdkit.transport.buffer import Array, as_buffer

_WHO = "AsynchronousOptimizer()"


class SharedValues:
    """The Service that keeps a slice of the parameters, and adds the changes that ranks send.

    start: the first values (n,), copied.
    """

    def __init__(self, start: Array, clocks: Clocks) -> None:
        self._values, self._clocks = start.copy(), clocks

    def take(self, rank: int, kind: float, numbers: Array) -> None:
        if kind == FINISH:
            self._clocks.finish(rank)
            return
        factor = self._clocks.push(rank)
        self._values += numbers if factor == 1.0 else factor * numbers

    def answers(self, waiting: Collection[int]) -> Mapping[int, Answer]:
        return dict.fromkeys(self._clocks.take_released(waiting), Answer(self._values))


class Asynchronous(Strategy):
    """Ranks step at their own pace, at most staleness + 1 times while another rank is in one step.

    staleness: 1 or more; scale_by_staleness: see Clocks. servers: on so many first ranks a thread keeps a slice of the
    parameters, in float32 (float64 where a parameter is).
    Raises ValueError for numbers that cannot be used.
    """

    overlaps_backward = False
    equal_replicas = False
    lockstep = False

    def __init__(self, staleness: int = 4, *, servers: int = 1, scale_by_staleness: bool = False) -> None:
        _check_numbers(staleness, servers)
        if staleness == 0:
            raise ValueError("Asynchronous(): staleness is 0; use AllReduce, which is that.")
        self._staleness, self._servers, self._scaled = staleness, servers, scale_by_staleness
        self._values: FlatValues | None = None
        self._links: list[ServerLink] = []

    def check(self, what: str, dtype: str) -> None:
        super().check(what, dtype)
        check_real(_WHO, what, dtype)

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. The servers begin with rank 0's values, which all ranks have after their next step."""
        self.detach()
        need_messages(_WHO)
        transport = group.transport
        _check_servers(self._servers, transport.size)
        words = f"Asynchronous {self._staleness} {self._servers} {self._scaled}"
        check_agreement(transport, describe_plan(parameters.tensors, 0, words))
        if not parameters.tensors:
            return
        self._size = transport.size
        self._values = values = FlatValues(parameters.tensors, parameters.values)
        self._before, self._after = (np.empty(values.count, values.dtype) for _ in range(2))
        values.read(self._before)
        transport.broadcast(as_buffer(self._before), 0)
        self._pieces = slices(values.count, self._servers)
        for root, (start, stop) in enumerate(self._pieces):
            own = transport.split([range(transport.size)])
            assert own is not None
            clocks = Clocks(transport.size, self._staleness, scaled=self._scaled)
            shared = SharedValues(self._before[start:stop], clocks)
            self._links.append(ServerLink(own, root, stop - start, values.dtype, shared))
        self._group = group
        refuse_join(_WHO, self, group)

    def before_step(self) -> None:
        """See Strategy.before_step; not collective."""
        if self._values is not None:
            self._values.read(self._before)

    def after_step(self) -> None:
        """See Strategy.after_step; not collective. Waits if the values of a rank would get too old.

        Raises RankLostError if a rank has ended.
        """
        if self._values is None:
            return
        self._values.read(self._after)
        np.subtract(self._after, self._before, out=self._after)
        self._after /= self._size
        self._exchange(PUSH)

    def finish(self) -> None:
        """Wait until all ranks call it, and give all of them the same parameters; collective.

        Until then this rank holds nobody back. Steps may follow.
        """
        if self._values is not None:
            self._values.read(self._after)  # as every write needs it
            self._exchange(FINISH)

    def _exchange(self, kind: float) -> None:
        assert self._values is not None
        for link, (start, stop) in zip(self._links, self._pieces, strict=True):
            link.ask(kind, self._after[start:stop] if kind == PUSH else None)
        for link, (start, stop) in zip(self._links, self._pieces, strict=True):
            self._after[start:stop] = link.answer().numbers
        self._values.write(self._after)

    def detach(self) -> None:
        links, self._links, self._values = self._links, [], None
        if links:
            allow_join(self, self._group)
        for link in links:
            link.close()


def slices(count: int, servers: int) -> list[tuple[int, int]]:
    """The (start, stop) of each server's elements."""
    return [(at * count // servers, (at + 1) * count // servers) for at in range(servers)]


def choose_asynchronous(
    staleness: int, servers: int, *, scaled: bool, process_set: ProcessSet, others: Collection[str]
) -> Asynchronous | None:
    """The strategy that the arguments of AsynchronousOptimizer() ask for; None for no other than AllReduce.

    others: arguments that it does not have. Raises ValueError or TypeError for what cannot be used.
    """
    refuse_arguments(_WHO, others)
    check_process_set(process_set, _WHO)
    _check_numbers(staleness, servers)
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
    """Raise ValueError or TypeError for numbers that cannot be used with any number of ranks."""
    check_integer(_WHO, "staleness", staleness, 0)
    check_integer(_WHO, "servers", servers, 1)


def _check_servers(servers: int, size: int) -> None:
    """Raise ValueError for more servers than ranks."""
    if servers > size:
        raise ValueError(
            f"{_WHO}: servers is {servers}, but there are {size} ranks, and a server is a thread of a rank. Use at "
            f"most servers={size}."
        )
