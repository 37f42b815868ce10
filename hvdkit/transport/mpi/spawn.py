"""Starts replacement ranks from a thread, so that training does not wait for them.

All ranks of a host together start the new ranks of that host. Open MPI's launcher overwrites its own memory if
processes of several hosts take part in connecting new processes (PRRTE 3.0, its callback for PMIx_Connect); and
processes of one host that have not been connected do not find each other there.

MPI waits forever for a process that has ended before it has joined MPI. So this thread may never return; it is then
abandoned, and the next thread has its own communicator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.log import logger
from hvdkit.transport.mpi.library import call_mpi, load_mpi, own_comm, revoke_comm, start_beside
from hvdkit.transport.mpi.ulfm import READY_TAG

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOK_S = 0.02


class Spawn:
    """Starts ranks on this host by the ranks of `comm`, which are all ranks of this host; collective among them.

    comm: a communicator for this object only.
    command: command line of the first new rank, with its number; only the argument of rank 0 of `comm` counts.
    count: number of ranks to start.
    host: this host's name for the launcher; "" if the world has only this host.
    ready: called on rank 0 of `comm`, in another thread, when all new ranks have joined MPI and wait.

    bridge: a communicator of the ranks of `comm` followed by the new ranks; None until these have joined MPI.
    """

    def __init__(
        self, comm: MPI.Intracomm, command: Sequence[str], count: int, host: str, ready: Callable[[], None]
    ) -> None:
        self.bridge: MPI.Intracomm | None = None
        self._given_up = False
        self.count = count
        self._comm, self._command, self._host, self._ready = comm, command, host, ready
        start_beside(self._run, "hvdkit-starting")

    def _run(self) -> None:
        try:
            child = self._spawn()
            bridge = own_comm(call_mpi("MPI_Intercomm_merge", child.Merge, False))
            self.bridge = bridge
            if self._given_up:
                revoke_comm(bridge)
            elif self._comm.rank == 0 and self._wait(bridge):
                self._ready()
        except RankLostError:
            pass  # a new rank has died while it joined, which hvdrun reports
        except HorovodInternalError as error:
            if not self._given_up:
                logger.warning("A replacement for a lost rank could not be started: %s", error)

    def _spawn(self) -> MPI.Intercomm:
        mpi = load_mpi()
        info = mpi.Info.Create()
        info.Set("map_by", "slot:oversubscribe")
        info.Set("bind_to", "none")
        if self._host:
            info.Set("host", self._host)
        child = call_mpi(
            "MPI_Comm_spawn", self._comm.Spawn, self._command[0], list(self._command[1:]), self.count, info, 0
        )
        info.Free()
        child.Set_errhandler(mpi.ERRORS_RETURN)
        return child

    def _wait(self, bridge: MPI.Intracomm) -> bool:
        for new in range(bridge.size - self.count, bridge.size):
            while not call_mpi("MPI_Iprobe", bridge.Iprobe, new, READY_TAG):
                if self._given_up:
                    return False
                time.sleep(_LOOK_S)
            call_mpi("MPI_Recv", bridge.Recv, [bytearray(1), load_mpi().BYTE], new, READY_TAG)
        return True

    def forget(self) -> None:
        """Stop waiting for the new ranks; the thread returns from MPI if it can."""
        self._given_up = True
        revoke_comm(self._comm)

    def give_up(self) -> None:
        """Stop waiting for the new ranks; if they come later, they end by themselves."""
        self.forget()
        if self.bridge is not None:
            revoke_comm(self.bridge)
