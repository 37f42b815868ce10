"""Ranks in the place of those that died, while they are on their way: all ranks know of all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdkit.elastic.starting import Starting
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.mpi.communicators import duplicate_comm
from hvdkit.transport.mpi.library import call_mpi, load_mpi, own_comm, revoke_comm
from hvdkit.transport.mpi.ulfm import COME_TAG, Arrivals

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOK_S = 0.02
# From the start of a process to hvd.init(), imports and all, on a busy machine.
_COMES_S = 120.0


class Place(NamedTuple):
    """Where a rank is: its host, how many ranks that had at first, and for how many it has slots."""

    host: str
    ranks: int
    slots: int


def plan_replacements(places: Sequence[Place], most: int) -> list[int]:
    """How many ranks each of those that are left starts, on its own host.

    places: by rank. most: that are started in all. The first rank of each host starts what is missing there, and where
    there are not enough of these places, in slots that were free from the beginning; where no rank is left none is
    started.
    """
    counts = [0] * len(places)
    hosts = [place.host for place in places]
    for room in (_ranks, _slots):
        for rank, host in enumerate(hosts):
            if hosts.index(host) == rank:
                most_here = max(room(place) for place in places if place.host == host)
                missing = most_here - hosts.count(host) - counts[rank]
                counts[rank] += max(0, min(missing, most - sum(counts)))
    return counts


def _ranks(place: Place) -> int:
    return place.ranks


def _slots(place: Place) -> int:
    return place.slots


class Replacing:
    """Ranks that are being started; made by all ranks of `world` together.

    first: of this host's ranks. command, count, host: see Starting; count is 0 if none is started on this host.
    expected: hosts on which some are. told: on rank 0, from another thread, at what time all of them were there and
    waited to be taken in, or it was plain that some will not come. died: has one of them?
    """

    def __init__(
        self,
        world: MPI.Intracomm,
        first: int,
        command: Sequence[str],
        count: int,
        host: str,
        expected: int,
        told: Callable[[float], None],
        died: Callable[[], bool],
    ) -> None:
        self._comm = own_comm(duplicate_comm(world))
        self._expected, self._told, self._died = expected, told, died
        self._given_up = False
        self._starters: list[int] = []
        local = own_comm(call_mpi("MPI_Comm_split", self._comm.Split, first, self._comm.rank))
        self._starting = Starting(local, command, count, host, self._say) if count else None
        if self._comm.rank == 0:
            threading.Thread(target=self._watch, name="hvdkit-replacing", daemon=True).start()

    @property
    def starters(self) -> list[int]:
        """On rank 0: who has started those that are there; the first rank of each host."""
        return list(self._starters)

    def _say(self) -> None:
        """Those that have been started here are there; on the first rank of this host."""
        if self._comm.rank == 0:
            self._starters.append(0)
        else:
            call_mpi("MPI_Send", self._comm.Send, [bytearray(1), load_mpi().BYTE], 0, COME_TAG)

    def _watch(self) -> None:
        """Tell when they have come, or will not."""
        deadline = time.monotonic() + _COMES_S
        try:
            while len(self._starters) < self._expected and not self._died() and time.monotonic() < deadline:
                if self._given_up:
                    return
                self._hear()
                time.sleep(_LOOK_S)
        except HorovodInternalError:
            return  # a rank has died, which those that train notice themselves
        if not self._given_up:
            self._told(time.time())

    def _hear(self) -> None:
        mpi = load_mpi()
        status = mpi.Status()
        while call_mpi("MPI_Iprobe", self._comm.Iprobe, mpi.ANY_SOURCE, COME_TAG, status):
            source = status.Get_source()
            call_mpi("MPI_Recv", self._comm.Recv, [bytearray(1), mpi.BYTE], source, COME_TAG)
            self._starters.append(source)

    def arrivals(self, starters: Sequence[int]) -> list[Arrivals]:
        """Those that have come, in the order of `starters`, which all ranks have from rank 0."""
        return [self._find_arrivals(one) for one in starters]

    def _find_arrivals(self, starter: int) -> Arrivals:
        if self._starting is None or starter != self._comm.rank:
            return Arrivals(starter)
        return Arrivals(starter, self._starting.bridge, self._starting.count)

    def forget(self) -> None:
        """Nobody wants to know any more whether they come: the training is over. Not collective."""
        self._given_up = True
        if self._starting is not None:
            self._starting.forget()

    def give_up(self) -> None:
        """Those that have not come are not waited for any more; if they come later they end. Not collective."""
        self._given_up = True
        if self._starting is not None:
            self._starting.give_up()
        revoke_comm(self._comm)
