"""Groups of ranks that do collectives among themselves, also at the same time as other groups."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.engine.api import Engine
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.errors import NotInitializedError
from hvdkit.transport.api import Transport
from hvdkit.transport.part import is_communicator, ranks_in_job
from hvdkit.transport.small_collectives import gather_bytes


class ProcessSet:
    """Some of the ranks, or all of them; to be made known to all ranks by init() or add_process_set().

    ranks_or_comm: numbers in the world, of all ranks if None; or a communicator of mpi4py's that holds this process and
    some of the world, in the world's order. Ranks may pass different ones, as MPI_Comm_split makes them: each rank then
    has the set that it is in. Raises ValueError for anything else.
    """

    #: Number of the set; None before it is added and after it is removed. 0 is the set of all ranks.
    process_set_id: int | None = None
    #: Numbers in the world; None for a communicator's, and for all ranks, before they are known.
    ranks: list[int] | None = None
    #: The communicator that it was made from, the user's own, for mpi4py beside hvdkit; None if it was from ranks.
    #: Of the set of all ranks the one that init() was given.
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
                    f"ProcessSet({ranks_or_comm!r}): a process set is made from a list of ranks, or from a "
                    f"communicator of mpi4py's."
                ) from None
        self._group: Group | None = None
        self._added: Sequence[ProcessSet] = ()  # by one call: with a communicator's set those of the other ranks'

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
                f"{self!r} is not known: it was never added, or it has been removed. Pass it to "
                f"init(process_sets=...), or call add_process_set() on every rank."
            )
        return self._group

    def size(self) -> int:
        """How many ranks it has. ValueError if it is not known."""
        return len(self._known().ranks)

    def rank(self) -> int:
        """This process's number in it, from 0. ValueError if it is not known, or without this process."""
        return self.group("rank()").transport.rank

    def included(self) -> bool:
        """Does it include this process? ValueError if it is not known."""
        return self._known().transport is not None

    def group(self, call: str) -> MemberGroup:
        """What its ranks share. call: the user's, for the ValueError on a rank outside of the set."""
        known = self._known()
        if known.transport is None or known.engine is None:
            raise ValueError(
                f"{call} was called on rank {known.this_rank}, which is not in {self!r}. Only the ranks of a process "
                f"set take part in its operations: ask process_set.included() before."
            )
        return MemberGroup(known.transport, known.engine)


class MemberGroup:
    """The ranks of a set as one of them sees them.

    transport: for plans of gradients. engine: for named operations.
    """

    def __init__(self, transport: Transport, engine: Engine) -> None:
        self.transport, self.engine = transport, engine


class Group:
    """A set that is known. transport, engine: None on ranks outside of it."""

    def __init__(
        self, ranks: Sequence[int], this_rank: int, transport: Transport | None, engine: Engine | None
    ) -> None:
        self.ranks, self.this_rank, self.transport, self.engine = list(ranks), this_rank, transport, engine


class ProcessSets:
    """The sets that are known in a world, by number.

    world: all ranks. open_engine: makes the engine of a set from a transport of its own and its ranks. job_ranks: see
    World.
    """

    def __init__(
        self,
        world: Transport,
        open_engine: Callable[[Transport, Sequence[int]], Engine],
        job_ranks: Sequence[int] = (),
    ) -> None:
        self._world, self._open_engine = world, open_engine
        self._job_ranks = job_ranks or range(world.size)
        self._sets: dict[int, ProcessSet] = {}
        self._free: list[int] = []  # numbers of removed sets; new ones get them in this order, as in Horovod

    def add(self, process_set: ProcessSet) -> None:
        """Make a set known; collective over all ranks, which give the same ranks.

        Of communicators, of which each rank gives its own, all sets become known.
        Raises ValueError for ranks that are not there or come twice, or a set of the same ranks that is known,
        HorovodInternalError if the ranks disagree about it.
        """
        sets = [process_set]
        if process_set.mpi_comm is not None and process_set is not global_process_set:
            found = self._find_ranks(process_set)
            process_set.ranks = next(list(ranks) for ranks in found if self._world.rank in ranks)
            sets = [process_set if self._world.rank in ranks else ProcessSet(ranks) for ranks in found]
        for one in sets:
            problem = self._together("add_process_set", one, functools.partial(self._add, one))
            if problem:
                raise ValueError(problem)
        process_set._added = sets

    def _find_ranks(self, process_set: ProcessSet) -> list[tuple[int, ...]]:
        """The ranks of all sets that the ranks' communicators make, in rising order; the same on all ranks."""
        data = json.dumps(ranks_in_job(process_set.mpi_comm, "ProcessSet(comm)")).encode()
        engine = self._sets[0]._known().engine
        assert engine is not None, "every rank is in the set of all ranks, which is the first"
        gathered = collective_step(engine, "process_set_of_comm", lambda transport, _: gather_bytes(transport, data))
        found = [tuple(json.loads(one)) for one in gathered]
        places = {job_rank: rank for rank, job_rank in enumerate(self._job_ranks)}
        sets = []
        for rank, members in enumerate(found):
            ranks = [places.get(one, -1) for one in members]
            others = [one for one in ranks if one >= 0 and found[one] != members]
            if ranks != sorted(set(ranks)) or ranks[0] < 0 or others:
                raise ValueError(
                    f"The communicator that rank {rank} has given for a process set holds ranks {list(members)} of the "
                    f"job, and the world consists of {list(self._job_ranks)}. A process set's are ranks of the world, "
                    f"in its order, which all give communicators of the same ranks"
                    f"{f'; rank {others[0]} has given one of {list(found[others[0]])}' if others else ''}. "
                    f"MPI_Comm_split with hvd.rank() as its key makes such ones."
                )
            sets.append(tuple(ranks))
        return sorted(set(sets))

    def _add(self, process_set: ProcessSet) -> str:
        """Make a set known; returns what is wrong with it, the same on all ranks, or ""."""
        everyone = list(range(self._world.size))
        ranks = everyone if process_set.ranks is None else process_set.ranks
        if process_set.process_set_id is not None:
            return f"{process_set!r} has been added already."
        if not set(ranks) <= set(everyone) or len(set(ranks)) < len(ranks):
            return f"A process set of ranks {ranks} cannot be made; ranks 0 to {everyone[-1]} are there, once each."
        for other in self._sets.values():
            if other._known().ranks == ranks:
                return f"A process set with the ranks {ranks} is known already: {other!r}."
        transport = own = None
        if ranks:
            transport = self._world if ranks == everyone else self._world.subgroup(ranks)
            own = self._world.subgroup(ranks)
        engine = self._open_engine(own, ranks) if own is not None else None
        process_set._group = Group(ranks, self._world.rank, transport, engine)
        process_set.process_set_id = self._free.pop(0) if self._free else len(self._sets)
        self._sets[process_set.process_set_id] = process_set
        if process_set.ranks is None or ranks == everyone:
            process_set.ranks = ranks
        return ""

    def _together(self, kind: str, process_set: ProcessSet, change: Callable[[], str]) -> str:
        """Change the sets on all ranks, in the order of the world's operations; returns what `change` does.

        Communicators are made and freed in there. Where MPI's calls take turns a rank that makes one makes no other
        call, so all ranks have to come to it in one order.
        """
        if not self._sets:
            return change()
        engine = self._sets[0]._known().engine
        assert engine is not None, "every rank is in the set of all ranks, which is the first"
        options = [("ranks", str(process_set.ranks))]
        problem: str = collective_step(engine, kind, lambda _transport, _joined: change(), options=options)
        return problem

    def remove(self, process_set: ProcessSet) -> bool:
        """Forget a set; collective over all ranks. False if it is not known, or the set of all ranks.

        Of communicators, of which each rank has given its own, all sets are forgotten, as all have become known.
        Raises HorovodInternalError if the ranks disagree about it.
        """
        if not process_set.process_set_id or process_set._group is None:
            return False
        for one in process_set._added:
            self._together("remove_process_set", one, functools.partial(self._forget, one))
        return True

    def _forget(self, process_set: ProcessSet, *, idle: bool = True) -> str:
        group, process_set._group = process_set._group, None
        assert group is not None and process_set.process_set_id is not None
        del self._sets[process_set.process_set_id]
        self._free.append(process_set.process_set_id)
        process_set.process_set_id = None
        if group.engine is not None:
            idle = idle and not group.engine.stopped
            if idle:
                group.engine.leave("has removed the process set")
            group.engine.close(idle=idle)
        if group.transport is not None and group.transport is not self._world:
            group.transport.close(idle=idle)
        return ""

    def ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of every known set, by number."""
        return {number: list(one._known().ranks) for number, one in self._sets.items()}

    def engines(self) -> list[Engine]:
        """Of the sets that include this process, that of all ranks first."""
        found = [self._sets[number]._known().engine for number in sorted(self._sets)]
        return [engine for engine in found if engine is not None]

    def leave(self, why: str) -> None:
        """Tell the other ranks of every set that this one takes no further part; not collective."""
        for one in self._sets.values():
            engine = one._known().engine
            if engine is not None:
                engine.leave(why)

    def leave_transports(self) -> None:
        """Tell the other ranks of every set's transports that this one takes no further part; not collective."""
        for one in self._sets.values():
            known = one._known()
            for transport in (known.transport, known.engine.transport if known.engine is not None else None):
                if transport is not None:
                    transport.leave()

    def close(self, *, idle: bool = True) -> bool:
        """Forget all sets; collective. The world's transport stays.

        idle: see Transport.close. Returns what to close that one with.
        """
        for number in sorted(self._sets, reverse=True):
            if number:
                self._forget(self._sets[number], idle=idle)
        for everyone in self._sets.values():
            group, everyone._group = everyone._group, None
            everyone.process_set_id = None
            if group is not None and group.engine is not None:
                idle = idle and not group.engine.stopped
                if idle:
                    group.engine.leave("has shut hvdkit down")
                group.engine.close(idle=idle)
        self._sets.clear()
        return idle


#: All ranks.
global_process_set = ProcessSet(None)
