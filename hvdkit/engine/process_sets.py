"""The process sets of a world: added, split, removed and closed by all ranks together.

Locks: none. The table changes only in collective steps of the world's engine, which run one after another and in the
same order on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvdkit.engine.groups import Group, OpenEngine, ProcessSet, global_process_set
from hvdkit.engine.named.api import Engine
from hvdkit.engine.named.submit import collective_step
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.division import group_by_color
from hvdkit.transport.rank_subset import plan_sets_of_comms, ranks_in_job
from hvdkit.transport.small_collectives import allgather_object

_END_S = 2.0  # for the threads of all engines, on a busy machine


class ProcessSets:
    """The process sets of a world, by number.

    world: the transport of all ranks.
    open_engine: see Group.
    job_ranks: see World.
    eager: open the engine when a set is made, because opening it is collective over all ranks (Horovod's core).
    """

    def __init__(
        self, world: Transport, open_engine: OpenEngine, job_ranks: Sequence[int] = (), *, eager: bool = False
    ) -> None:
        self._world, self._open_engine, self._eager = world, open_engine, eager
        self._job_ranks = job_ranks or range(world.size)
        self._sets: dict[int, ProcessSet] = {}
        self._free: list[int] = []  # numbers of removed sets; new ones get them in this order, as in Horovod

    @property
    def _engine(self) -> Engine:
        """The engine of the set of all ranks, which is set 0."""
        return self._sets[0]._known().engine

    def open_world(self) -> None:
        """Register the set of all ranks and open its engine; collective. Called before any other set is added."""
        everyone = list(range(self._world.size))
        global_process_set.ranks = None  # an earlier world may have had others
        self._register([global_process_set], [everyone])
        assert global_process_set._known().engine is not None

    def add(self, process_set: ProcessSet) -> None:
        """Add a set; collective over all ranks, which pass the same ranks.

        If the ranks pass sets made from communicators, each its own, the sets of all of them are added.
        Raises ValueError for ranks that do not exist or occur twice, or if a set of these ranks exists,
        HorovodInternalError if the ranks disagree about it.
        """
        comm = process_set.mpi_comm if process_set is not global_process_set else None
        in_job = ranks_in_job(comm, "ProcessSet(comm)") if comm is not None else ()

        def change(transport: Transport, _joined: object) -> ValueError | None:
            try:
                if comm is None:
                    sets, groups = [process_set], [self._all if process_set.ranks is None else process_set.ranks]
                else:
                    members = allgather_object(transport, in_job)
                    groups = [list(ranks) for ranks in plan_sets_of_comms(members, self._job_ranks)]
                    process_set.ranks = next(ranks for ranks in groups if self._world.rank in ranks)
                    sets = [process_set if ranks is process_set.ranks else ProcessSet(ranks) for ranks in groups]
                self._check(sets, groups)
            except ValueError as error:
                return error
            self._register(sets, groups)
            return None

        described = "those of communicators" if comm is not None else str(process_set.ranks)
        problem = collective_step(self._engine, "add_process_set", change, options=[("ranks", described)])
        if problem is not None:
            raise problem

    def split(self, color: int | None, key: int = 0) -> ProcessSet | None:
        """Make a set of the ranks that pass the same color, ordered by key and then by rank; None for a color of None.

        Collective over all ranks: one operation, and one call of the transport, makes all of the sets, for example
        those of an axis of a mesh. A set of the same ranks that exists already is returned.
        """

        def change(transport: Transport, _joined: object) -> ProcessSet | None:
            colors, keys = zip(*allgather_object(transport, (color, key)), strict=True)
            groups = group_by_color(colors, keys)
            known = {tuple(each._known().ranks): each for each in self._sets.values()}
            missing = [ranks for ranks in groups if tuple(ranks) not in known]
            sets = [ProcessSet(ranks) for ranks in missing]
            for process_set, ranks in zip(sets, missing, strict=True):
                process_set.ranks = ranks  # in the order of their keys
            self._register(sets, missing)
            own = next((tuple(ranks) for ranks in groups if self._world.rank in ranks), None)
            known |= {tuple(each._known().ranks): each for each in sets}
            return None if own is None else known[own]

        own_set: ProcessSet | None = collective_step(self._engine, "split_world", change)
        return own_set

    def open_transport(self, what: str) -> Transport:
        """Open another transport of all ranks, which the caller closes; collective.

        what: its purpose, which all ranks must pass alike.
        """
        opened: Transport = collective_step(self._engine, what, lambda *_: self._world.split([self._all]))
        return opened

    @property
    def _all(self) -> list[int]:
        return list(range(self._world.size))

    def _check(self, sets: Sequence[ProcessSet], groups: Sequence[Sequence[int]]) -> None:
        """Raise ValueError for sets that cannot be added, the same on all ranks."""
        for process_set, ranks in zip(sets, groups, strict=True):
            if process_set.process_set_id is not None:
                raise ValueError(f"{process_set!r} has been added already.")
            if not set(ranks) <= set(self._all) or len(set(ranks)) < len(ranks):
                raise ValueError(
                    f"A process set of ranks {list(ranks)} cannot be added. It must hold ranks from 0 to "
                    f"{self._all[-1]}, each at most once."
                )
            for other in self._sets.values():
                if other._known().ranks == list(ranks):
                    raise ValueError(f"A process set of ranks {list(ranks)} has been added already: {other!r}.")

    def _register(self, sets: Sequence[ProcessSet], groups: Sequence[Sequence[int]]) -> None:
        """Give disjoint sets numbers, transports and groups.

        Collective over all ranks, in a collective step or before the first.
        """
        some = [list(ranks) for ranks in groups if ranks]
        transport = spare = None
        if some:
            transport = self._world if some == [self._all] else self._world.split(some)
            spare = self._world.split(some)
        for process_set, ranks in zip(sets, groups, strict=True):
            mine = (transport, spare) if self._world.rank in ranks else (None, None)
            process_set._group = Group(ranks, self._world.rank, *mine, self._open_engine)
            process_set.process_set_id = self._free.pop(0) if self._free else len(self._sets)
            process_set._siblings = sets
            self._sets[process_set.process_set_id] = process_set
            if process_set.ranks is None or list(ranks) == self._all:
                process_set.ranks = list(ranks)
            if self._eager and process_set._group.included:
                assert process_set._group.engine is not None

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set; collective over all ranks. Returns False if it is not added, or is the set of all ranks.

        For sets made from communicators each rank passes its own, and all sets that were added together are removed.
        Raises HorovodInternalError if the ranks disagree about it.
        """
        if not process_set.process_set_id or process_set._group is None:
            return False
        sets = process_set._siblings

        def change(transport: Transport, _joined: object) -> None:
            unequal = self._used_by_some(transport)
            for each in sets:
                assert each._group is not None and each.process_set_id is not None
                number, group = each.process_set_id, each._group
                each._group = each.process_set_id = None
                del self._sets[number]
                self._free.append(number)
                group.close("has removed the process set", idle=number not in unequal)

        options = [("ranks", "; ".join(str(each.ranks) for each in sets))]
        collective_step(self._engine, "remove_process_set", change, options=options)
        return True

    def _used_by_some(self, transport: Transport) -> set[int]:
        """Return the numbers of sets that some of their ranks have used and others not; collective over all ranks."""
        sets = {number: each._known() for number, each in self._sets.items()}
        gathered = allgather_object(transport, {number for number, group in sets.items() if group.is_open})
        return {number for number, group in sets.items() if len({number in gathered[rank] for rank in group.ranks}) > 1}

    def _find_unequal(self) -> set[int]:
        """Like _used_by_some(); if a rank has left and cannot reply, all sets except that of all ranks."""
        try:
            found = collective_step(
                self._engine, "shutdown", lambda transport, _: self._used_by_some(transport), name="sets"
            )
        except HorovodInternalError:
            self.leave("has shut hvdkit down")
            return set(self._sets) - {0}
        assert isinstance(found, set)
        return found

    def ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every set, by number."""
        return {number: list(each._known().ranks) for number, each in self._sets.items()}

    def engines(self) -> list[Engine]:
        """Return the engines of the sets that include this process, set 0 first; opens those that are not open."""
        groups = [self._sets[number]._known() for number in sorted(self._sets)]
        return [group.engine for group in groups if group.included]

    def leave(self, why: str) -> None:
        """Notify the other ranks of every set that this rank has stopped; not collective. why: see Group.leave()."""
        groups = [each._known() for each in self._sets.values()]
        for group in groups:
            group.leave(why)
        deadline = time.monotonic() + _END_S  # MPI may be finalized soon, and no thread may be in a call of it then
        for thread in [group._engine.thread for group in groups if group._engine is not None]:
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def leave_transports(self) -> None:
        """Notify the peers in every set's transports that this rank has stopped; not collective."""
        for each in self._sets.values():
            each._known().leave_transports()

    def close(self, *, idle: bool = True) -> bool:
        """Close all sets; collective. The world's transport stays open.

        idle: see Transport.close. Returns the `idle` with which the caller must close the world's transport.
        """
        idle = idle and not self._engine.stopped if self._sets else idle
        unequal = self._find_unequal() if idle and len(self._sets) > 1 else set()
        for number in sorted(self._sets, reverse=True):  # the set of all ranks last
            process_set = self._sets.pop(number)
            group = process_set._known()
            process_set._group = process_set.process_set_id = None
            in_step = group.close("has shut hvdkit down", idle=idle and number not in unequal, keep=self._world)
            if not number:
                idle = in_step
        return idle
