"""Process sets: groups of ranks that do collectives among themselves, also at the same time as other groups.

A group costs next to nothing until its first operation or plan: it holds two transports that have allocated nothing yet
(see Transport.split). The first operation opens the group's engine on this rank, with a thread and memory for messages.
Opening does not wait for other ranks, so ranks may use groups for the first time in any order and from any thread. The
lock `_opening` is held while the engine is made. process_sets.py holds the process sets of a world.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.engine.named.api import Engine
from hvdkit.errors import NotInitializedError
from hvdkit.transport.api import Transport
from hvdkit.transport.rank_subset import is_communicator, ranks_in_job

OpenEngine = Callable[[Transport, Sequence[int]], Engine]


class Group:
    """The ranks of a process set, as this process sees them.

    ranks: the group's ranks, as numbers in the world.
    this_rank: this process's number in the world.
    transport: for plans of gradients, see Transport.split; None outside the group.
    spare: a second transport, for the engine alone; None outside the group.
    open_engine: makes the engine of a group from a transport and ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        this_rank: int,
        transport: Transport | None,
        spare: Transport | None,
        open_engine: OpenEngine,
    ) -> None:
        self.ranks, self.this_rank = list(ranks), this_rank
        self.included = transport is not None
        self._transport, self._spare, self._open_engine = transport, spare, open_engine
        self._engine: Engine | None = None
        self._opening = threading.Lock()

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def transport(self) -> Transport:
        """The transport for plans of gradients; it also has this process's rank in the group."""
        assert self._transport is not None, "ProcessSet.group() refuses ranks outside of the group"
        return self._transport

    @property
    def engine(self) -> Engine:
        """The engine for named operations; opened at the first use."""
        return self._engine or self._open()

    def _open(self) -> Engine:
        with self._opening:
            if self._engine is None:
                assert self._spare is not None, "ProcessSet.group() refuses ranks outside of the group"
                self._engine = self._open_engine(self._spare, self.ranks)
            return self._engine

    @property
    def is_open(self) -> bool:
        """Has this process used the group?"""
        return self._engine is not None

    def leave(self, why: str) -> None:
        """Notify the other ranks that this rank has stopped; not collective. why: follows its name in messages."""
        if self._engine is not None:
            self._engine.leave(why)

    def leave_transports(self) -> None:
        """Notify the ranks that wait in a transport that this rank has stopped; not collective."""
        for transport in (self._transport, self._spare):
            if transport is not None:
                transport.leave()

    def close(self, why: str, *, idle: bool, keep: Transport | None = None) -> bool:
        """Close the engine and the transports; collective among its ranks. Returns whether the ranks were in step.

        why: follows this rank's name in the errors of ranks that still wait.
        idle: see Transport.close; also False if some ranks have used the group and others have not.
        keep: a transport that stays open.
        """
        if self._engine is not None:
            idle = idle and not self._engine.stopped
            if idle:
                self._engine.leave(why)
            self._engine.close(idle=idle)
        elif self._spare is not None:
            self._spare.close(idle=idle)
        if self._transport is not None and self._transport is not keep:
            self._transport.close(idle=idle)
        return idle


class ProcessSet:
    """A subset of the ranks, or all of them; pass it to init() or add_process_set() before use.

    ranks_or_comm: rank numbers, or None for all ranks; or an mpi4py communicator that contains this process and ranks
    of the world in the order of the world. Ranks may pass different communicators, as MPI_Comm_split makes them: each
    rank then gets the set that contains it. Raises ValueError for anything else.
    """

    #: Number of the set; None before it is added and after it is removed. 0 is the set of all ranks.
    process_set_id: int | None = None
    #: Numbers in the world; None before the set is added, if it is of all ranks or made from a communicator.
    ranks: list[int] | None = None
    #: The user's communicator that the set was made from, for use with mpi4py; None if it was made from ranks. The set
    #: of all ranks has the communicator that was passed to init().
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any | None) -> None:
        if is_communicator(ranks_or_comm):
            ranks_in_job(ranks_or_comm, "ProcessSet(comm)")
            self.mpi_comm = ranks_or_comm
        elif ranks_or_comm is not None:
            try:
                self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
            except TypeError:
                raise ValueError(
                    f"ProcessSet({ranks_or_comm!r}): pass a list of ranks or an mpi4py communicator."
                ) from None
        self._group: Group | None = None
        self._siblings: Sequence[ProcessSet] = ()  # sets of the same call; with communicators, also other ranks' sets

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __str__(self) -> str:
        """As Horovod prints it."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def _known(self) -> Group:
        if self._group is None:
            if self.ranks is None and self.mpi_comm is None:
                raise NotInitializedError("A collective")
            raise ValueError(
                f"{self!r} has not been added, or has been removed. Pass it to init(process_sets=...), or call "
                "add_process_set() on every rank."
            )
        return self._group

    def size(self) -> int:
        """The number of its ranks. Raises ValueError if the set has not been added."""
        return self._known().size

    def rank(self) -> int:
        """The number of this process in the set, from 0.

        Raises ValueError if the set has not been added, or does not contain this process.
        """
        return self.group("rank()").transport.rank

    def included(self) -> bool:
        """Does the set contain this process? Raises ValueError if the set has not been added."""
        return self._known().included

    def group(self, call: str) -> Group:
        """Return the Group of its ranks. call: the user's, for messages.

        Raises NotInitializedError before init(), ValueError if the set is not added or does not contain this process.
        """
        group = self._group
        if group is None or not group.included:
            raise self._refuse(call)
        return group

    def _refuse(self, call: str) -> ValueError:
        if global_process_set._group is None:
            return NotInitializedError(call)
        return ValueError(
            f"{call} was called on rank {self._known().this_rank}, which is not in {self!r}. Only the ranks of a "
            "process set may call its operations. Check process_set.included() first."
        )


#: All ranks.
global_process_set = ProcessSet(None)


def group_of(process_set: Any, call: str) -> Group:
    """Return process_set.group(call). Raises TypeError for anything but a ProcessSet, such as a list of ranks."""
    if not isinstance(process_set, ProcessSet):
        check_process_set(process_set, call)
    group: Group = process_set.group(call)
    return group


def check_process_set(process_set: Any, call: str) -> None:
    """Raise TypeError for anything but a ProcessSet. call: the public function."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{call}: process_set is {process_set!r}, but it must be an hvd.ProcessSet. Pass what "
            "hvd.add_process_set([...ranks]) returns on all ranks, or leave it out for all ranks."
        )
