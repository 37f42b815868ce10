"""Starting ranks in the place of those that died, beside the training: nobody waits until they are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdkit.errors import HorovodInternalError, RankLostError, TransportError
from hvdkit.log import logger
from hvdkit.transport.mpi_library import call_mpi, free_comm, load_mpi, own_comm
from hvdkit.transport.mpi_world import READY_TAG

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOK_S = 0.02


class Replacing:
    """Ranks that are being started; made by all ranks of `world` together.

    command: of the first, with its number. count: how many. come: told on rank 0, from another thread, at what time all
    of them were there and waited to be taken in.
    """

    def __init__(self, world: MPI.Intracomm, command: Sequence[str], count: int, come: Callable[[float], None]) -> None:
        self._comm = own_comm(call_mpi("MPI_Comm_dup", world.Dup))
        self._others: MPI.Intercomm | None = None
        self._given_up = False
        self._command, self._count, self._come = command, count, come
        self._thread = threading.Thread(target=self._run, name="hvdkit-replacing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            others = self._spawn()
            self._others = others
            if self._given_up:
                call_mpi("MPIX_Comm_revoke", others.Revoke)
            elif self._comm.rank == 0 and self._wait_for_all(others):
                self._come(time.time())
        except RankLostError:
            pass  # of those that start them, who notice it themselves
        except HorovodInternalError as error:
            if not self._given_up:
                logger.warning("No rank could be started in place of one that was lost: %s", error)

    def _spawn(self) -> MPI.Intercomm:
        mpi = load_mpi()
        info = mpi.Info.Create()
        info.Set("map_by", "slot:oversubscribe")
        info.Set("bind_to", "none")
        found = call_mpi(
            "MPI_Comm_spawn", self._comm.Spawn, self._command[0], list(self._command[1:]), self._count, info, 0
        )
        info.Free()
        found.Set_errhandler(mpi.ERRORS_RETURN)
        return found

    def _wait_for_all(self, others: MPI.Intercomm) -> bool:
        mpi = load_mpi()
        for _ in range(self._count):
            while not call_mpi("MPI_Iprobe", others.Iprobe, mpi.ANY_SOURCE, READY_TAG):
                if self._given_up:
                    return False
                time.sleep(_LOOK_S)
            call_mpi("MPI_Recv", others.Recv, [bytearray(1), mpi.BYTE], mpi.ANY_SOURCE, READY_TAG)
        return True

    def wait(self) -> MPI.Intercomm:
        """The way to them, once they have been started; collective. Raises TransportError if they could not be."""
        self._thread.join()
        if self._others is None:
            raise TransportError("The ranks that are said to have come could not be started from here.")
        free_comm(self._comm)
        return self._others

    def give_up(self) -> None:
        """They are not waited for any more; those that come later end by themselves."""
        self._given_up = True
        if self._others is not None:
            call_mpi("MPIX_Comm_revoke", self._others.Revoke)
