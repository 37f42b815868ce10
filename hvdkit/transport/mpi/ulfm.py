"""The ranks that there are now, where MPI can go on without those that died: Open MPI's fault tolerance (ULFM).

The world's own communicator carries no messages. So it is never revoked, and what is left of it can be taken on from
it, whatever became of the communicators made from it. Its ranks leave it together, by shrink() or by grow(): some may
have heard of a death while others take in those that have come, so all agree first on which of the two it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.transport.mpi.communicators import duplicate_comm
from hvdkit.transport.mpi.library import (
    call_mpi,
    is_ours_to_end,
    let_others_make,
    load_mpi,
    own_comm,
    revoke_all,
    revoke_comm,
    wait_for_those_beside,
)
from hvdkit.transport.mpi.pmix import leave_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

#: From a rank that joins to the one that has started it: it is ready to be taken in.
READY_TAG = 1
# From the one that has started it: join us, and then take in those of these.
_JOIN_TAG, _MEET_TAG = 3, 4
_LOOK_S = 0.02
_BACK_S = 1.0


class Arrivals(NamedTuple):
    """Ranks of a host that have been started together and are there.

    starter: who did, the first rank of that host. On that rank: bridge: to them, the last ones in it. amount: of them.
    """

    starter: int
    bridge: MPI.Intracomm | None = None
    amount: int = 0


class _World:
    """comm: of all ranks there are; None before it is asked for. changed: are these others than were launched?

    parting: its ranks have agreed that nobody is taken in, so what is left of it is to go on.
    """

    def __init__(self) -> None:
        self.comm: MPI.Intracomm | None = None
        self.changed = self.parting = False


_world = _World()


def world_comm() -> MPI.Intracomm:
    """Of all ranks that there are now; collective at first, and then on a rank that joins others until they take it."""
    if _world.comm is None:
        mpi = load_mpi()
        starter = mpi.Comm.Get_parent()
        if starter == mpi.COMM_NULL:
            _take(duplicate_comm(mpi.COMM_WORLD))
        else:
            starter.Set_errhandler(mpi.ERRORS_RETURN)
            _world.changed = True
            _take(_join(own_comm(call_mpi("MPI_Intercomm_merge", starter.Merge, True))))
    assert _world.comm is not None
    return _world.comm


def _join(bridge: MPI.Intracomm) -> MPI.Intracomm:
    """Wait to be taken in by those that are there. bridge: to the one that has started this one, as rank 0."""
    mpi = load_mpi()
    status = mpi.Status()
    call_mpi("MPI_Send", bridge.Send, [bytearray(1), mpi.BYTE], 0, READY_TAG)
    while not call_mpi("MPI_Iprobe", bridge.Iprobe, 0, _JOIN_TAG, status):
        time.sleep(_LOOK_S)
    data = bytearray(status.Get_count(mpi.BYTE))
    call_mpi("MPI_Recv", bridge.Recv, [data, mpi.BYTE], 0, _JOIN_TAG)
    together = own_comm(duplicate_comm(mpi.COMM_WORLD))
    others = call_mpi("MPI_Intercomm_create", together.Create_intercomm, 0, bridge, 0, _MEET_TAG)
    comm = _merge(others, joins=True)
    for starter in json.loads(data):
        comm = _meet(comm, Arrivals(starter))
    return comm


def _meet(comm: MPI.Intracomm, arrivals: Arrivals) -> MPI.Intracomm:
    """Those of `comm`, and behind them ranks that have come; collective among them."""
    bridge = arrivals.bridge if arrivals.bridge is not None else load_mpi().COMM_SELF  # which only the starter's counts
    new = bridge.size - arrivals.amount
    others = call_mpi("MPI_Intercomm_create", comm.Create_intercomm, arrivals.starter, bridge, new, _MEET_TAG)
    return _merge(others, joins=False)


def _merge(others: MPI.Intercomm, *, joins: bool) -> MPI.Intracomm:
    own_comm(others)
    return own_comm(call_mpi("MPI_Intercomm_merge", others.Merge, joins))


def has_changed() -> bool:
    """Are the ranks others than the launcher started?"""
    return _world.changed


def leave_mpi() -> None:
    """End MPI at the end of a process whose world may change; of any other mpi4py does that."""
    if is_ours_to_end():
        if _world.changed:
            leave_launcher()  # at which calls for which the launcher is needed fail
            wait_for_those_beside(_BACK_S)
        else:
            load_mpi().Finalize()


def shrink() -> int:
    """Go on with the ranks that are left, in their order; collective among them. Returns how many have gone."""
    before = world_comm()
    let_others_make()  # a thread that starts ranks may be in the middle of that, and never come back
    if not _world.parting:
        _all_grow(False)
    _take(call_mpi("MPIX_Comm_shrink", before.Shrink))
    _world.changed = True
    return int(before.size - world_comm().size)


def is_so_on_all(true: bool) -> bool:
    """Is it true on every rank? The same answer on all; collective. Raises RankLostError if one has died."""
    return bool(call_mpi("MPIX_Comm_agree", world_comm().Agree, int(true)))


def grow(arrivals: Sequence[Arrivals]) -> None:
    """Take in ranks that have come, one host after another, behind those that are there; collective.

    Raises RankLostError, on all ranks, if one of them or of those that are there has died; nobody is taken in then.
    """
    starters = [one.starter for one in arrivals]
    try:
        comm = own_comm(duplicate_comm(world_comm()))
        for at, some in enumerate(arrivals):
            if some.bridge is not None:
                _let_in(some.bridge, some.amount, starters[at + 1 :])
            comm = _meet(comm, some)
    except HorovodInternalError:
        revoke_all()  # other ranks may be waiting for this one in there
        _all_grow(False)
        raise
    if not _all_grow(True):
        revoke_comm(comm)  # those who come are waiting in there
        raise RankLostError("The new ranks were not added to the world, because a rank has died meanwhile.")
    _take(comm)
    _world.changed = True


def _let_in(bridge: MPI.Intracomm, count: int, after: Sequence[int]) -> None:
    """Tell the last ranks of `bridge` to come in. after: starters of those that come behind them."""
    data = json.dumps(list(after)).encode()
    for new in range(bridge.size - count, bridge.size):
        call_mpi("MPI_Send", bridge.Send, [data, load_mpi().BYTE], new, _JOIN_TAG)


def _all_grow(willing: bool) -> bool:
    """Can all ranks go on in the larger world? The same answer on all that live; collective, whoever has died."""
    try:
        together = is_so_on_all(willing)
    except RankLostError:
        together = False
    _world.parting = not together
    return together


def _take(comm: MPI.Comm) -> None:
    comm.Set_errhandler(load_mpi().ERRORS_RETURN)
    _world.comm, _world.parting = cast("MPI.Intracomm", comm), False
