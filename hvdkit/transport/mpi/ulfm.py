"""The communicator of the present ranks, which can shrink and grow by Open MPI's fault tolerance (ULFM).

The world's own communicator carries no messages. So it is never revoked, and the surviving ranks can always continue
from it, whatever happens to the communicators made from it. Its ranks leave it together, by shrink() or by grow(). Some
ranks may have noticed a death while others are adding new ranks, so all ranks first agree on one of the two.
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
    load_mpi,
    own_comm,
    release_cid,
    revoke_all,
    revoke_comm,
    wait_for_those_beside,
)
from hvdkit.transport.mpi.pmix import leave_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

#: Tag of the message from a new rank to the rank that has started it: the new rank is ready to join.
READY_TAG = 1
# Tag of the message from the starter to a new rank (join, and then let the ranks of the listed starters join), and tag
# for making the communicators with the new ranks.
_JOIN_TAG, _MEET_TAG = 3, 4
_LOOK_S = 0.02
_BACK_S = 1.0


class StartedGroup(NamedTuple):
    """New ranks of a host that were started together and are ready.

    starter: the rank that has started them, the first of that host. bridge: on the starter, the communicator whose last
    ranks they are; elsewhere None. amount: on the starter, their number; elsewhere 0.
    """

    starter: int
    bridge: MPI.Intracomm | None = None
    amount: int = 0


class _World:
    """The present world.

    comm: the communicator of all ranks; None before the first use. changed: the ranks differ from those that the
    launcher started. parting: its ranks have agreed to add no ranks, so the surviving ranks continue by shrink().
    """

    def __init__(self) -> None:
        self.comm: MPI.Intracomm | None = None
        self.changed = self.parting = False


_world = _World()


def world_comm() -> MPI.Intracomm:
    """Return the communicator of all present ranks. The first call is collective; in a new rank it waits to join."""
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
    """Wait until the present ranks add this rank. bridge: a communicator whose rank 0 is this rank's starter."""
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
        comm = _meet(comm, StartedGroup(starter))
    return comm


def _meet(comm: MPI.Intracomm, arrivals: StartedGroup) -> MPI.Intracomm:
    """Make a communicator of the ranks of `comm` followed by new ranks; collective among the ranks of `comm`."""
    bridge = arrivals.bridge if arrivals.bridge is not None else load_mpi().COMM_SELF  # only the starter's is used
    new = bridge.size - arrivals.amount
    others = call_mpi("MPI_Intercomm_create", comm.Create_intercomm, arrivals.starter, bridge, new, _MEET_TAG)
    return _merge(others, joins=False)


def _merge(others: MPI.Intercomm, *, joins: bool) -> MPI.Intracomm:
    own_comm(others)
    return own_comm(call_mpi("MPI_Intercomm_merge", others.Merge, joins))


def has_changed() -> bool:
    """Return whether the ranks differ from those that the launcher started."""
    return _world.changed


def leave_mpi() -> None:
    """End MPI at the end of a process whose world may change; in any other process mpi4py ends it."""
    if is_ours_to_end():
        if _world.changed:
            leave_launcher()  # calls in progress that need the launcher fail then
            wait_for_those_beside(_BACK_S)
        else:
            load_mpi().Finalize()


def shrink() -> int:
    """Continue with the surviving ranks, in their order; collective among them. Returns how many have died."""
    before = world_comm()
    release_cid()  # a thread that starts ranks may be blocked in the creation of a communicator
    if not _world.parting:
        _all_grow(False)
    _take(call_mpi("MPIX_Comm_shrink", before.Shrink))
    _world.changed = True
    return int(before.size - world_comm().size)


def is_so_on_all(true: bool) -> bool:
    """Return on every rank whether `true` is True on all; collective. Raises RankLostError if a rank has died."""
    return bool(call_mpi("MPIX_Comm_agree", world_comm().Agree, int(true)))


def grow(arrivals: Sequence[StartedGroup]) -> None:
    """Add new ranks after the present ranks, one host after another; collective.

    Raises RankLostError on all ranks, and adds no rank, if a new or present rank has died.
    """
    starters = [one.starter for one in arrivals]
    try:
        comm = own_comm(duplicate_comm(world_comm()))
        for at, some in enumerate(arrivals):
            if some.bridge is not None:
                _let_in(some.bridge, some.amount, starters[at + 1 :])
            comm = _meet(comm, some)
    except HorovodInternalError:
        revoke_all()  # other ranks may be waiting for this rank in calls on these communicators
        _all_grow(False)
        raise
    if not _all_grow(True):
        revoke_comm(comm)  # the new ranks are waiting in calls on it
        raise RankLostError("The new ranks were not added to the world, because a rank has died meanwhile.")
    _take(comm)
    _world.changed = True


def _let_in(bridge: MPI.Intracomm, count: int, after: Sequence[int]) -> None:
    """Notify the last `count` ranks of `bridge` to join. after: starters of the ranks that join after them."""
    data = json.dumps(list(after)).encode()
    for new in range(bridge.size - count, bridge.size):
        call_mpi("MPI_Send", bridge.Send, [data, load_mpi().BYTE], new, _JOIN_TAG)


def _all_grow(willing: bool) -> bool:
    """Return, the same on all surviving ranks, whether all can continue in the larger world.

    It is collective, even if ranks have died. willing: this rank can continue.
    """
    try:
        together = is_so_on_all(willing)
    except RankLostError:
        together = False
    _world.parting = not together
    return together


def _take(comm: MPI.Comm) -> None:
    comm.Set_errhandler(load_mpi().ERRORS_RETURN)
    _world.comm, _world.parting = cast("MPI.Intracomm", comm), False
