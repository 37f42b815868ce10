"""Implements Membership (transport/backend.py) for MPI, on top of ulfm.py and spawn.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdkit.errors import HorovodInternalError
from hvdkit.transport.mpi import ulfm
from hvdkit.transport.mpi.communicators import duplicate_comm, make_comm
from hvdkit.transport.mpi.library import call_mpi, cid_workaround, load_mpi, own_comm, revoke_all, revoke_comm
from hvdkit.transport.mpi.spawn import Spawn
from hvdkit.transport.mpi.ulfm import StartedGroup

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOK_S = 0.02
# Limit of the time from the start of a process to hvd.init(), including imports, on a busy machine.
_COMES_S = 120.0
# Tag of the message from a rank that has started ranks to rank 0: they are ready.
_READY_TAG = 2

changed = ulfm.has_changed
shrink = ulfm.shrink
is_so_on_all = ulfm.is_so_on_all
interrupt = revoke_all
changing = cid_workaround


def rank() -> int:
    """See Membership.rank."""
    return ulfm.world_comm().rank


def size() -> int:
    """See Membership.size."""
    return ulfm.world_comm().size


def start_ranks(
    command: Sequence[str],
    counts: Sequence[int],
    *,
    first: int,
    host: str,
    ready: Callable[[float], None],
    died: Callable[[], bool],
) -> StartedRanks:
    """See Membership.start_ranks."""
    comm = own_comm(duplicate_comm(ulfm.world_comm()))
    local = own_comm(make_comm("MPI_Comm_split", comm, first, comm.rank))
    started = StartedRanks(comm, sum(count > 0 for count in counts), ready, died)
    if counts[first]:
        started.spawn = Spawn(local, command, counts[first], host, started.report)
    return started


class StartedRanks:
    """See PendingRanks; all ranks of `comm` make it together.

    comm: used by this object only; give_up() revokes it.
    expected: number of hosts on which ranks are started.
    ready: see Membership.start_ranks().
    died: see Membership.start_ranks().
    spawn: starts the ranks of this host; None if none are started here.
    """

    def __init__(
        self, comm: MPI.Intracomm, expected: int, ready: Callable[[float], None], died: Callable[[], bool]
    ) -> None:
        self.spawn: Spawn | None = None
        self._comm, self._expected, self._ready, self._died = comm, expected, ready, died
        self._given_up = False
        self._starters: list[int] = []
        if comm.rank == 0:
            threading.Thread(target=self._watch, name="hvdkit-replacing", daemon=True).start()

    @property
    def starters(self) -> list[int]:
        return list(self._starters)

    def report(self) -> None:
        """Notify rank 0 that the ranks started on this host are ready; called on the first rank of this host."""
        if self._comm.rank == 0:
            self._starters.append(0)
        else:
            call_mpi("MPI_Send", self._comm.Send, [bytearray(1), load_mpi().BYTE], 0, _READY_TAG)

    def _watch(self) -> None:
        """Call `ready` when all new ranks are ready, or some never will be."""
        deadline = time.monotonic() + _COMES_S
        try:
            while len(self._starters) < self._expected and not self._died() and time.monotonic() < deadline:
                if self._given_up:
                    return
                self._receive()
                time.sleep(_LOOK_S)
        except HorovodInternalError:
            return  # a rank has died, which the training ranks notice themselves
        if not self._given_up:
            self._ready(time.time())

    def _receive(self) -> None:
        mpi = load_mpi()
        status = mpi.Status()
        while call_mpi("MPI_Iprobe", self._comm.Iprobe, mpi.ANY_SOURCE, _READY_TAG, status):
            source = status.Get_source()
            call_mpi("MPI_Recv", self._comm.Recv, [bytearray(1), mpi.BYTE], source, _READY_TAG)
            self._starters.append(source)

    def take_in(self, starters: Sequence[int]) -> None:
        own = () if self.spawn is None else (self.spawn.bridge, self.spawn.count)
        ulfm.grow([StartedGroup(starter, *(own if starter == self._comm.rank else ())) for starter in starters])

    def forget(self) -> None:
        self._given_up = True
        if self.spawn is not None:
            self.spawn.forget()

    def give_up(self) -> None:
        self._given_up = True
        if self.spawn is not None:
            self.spawn.give_up()
        revoke_comm(self._comm)
