"""Rank 1 dies while all are making communicators; the others go on, and make more."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import hvdkit.torch as hvd
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi import ulfm as mpi_world

if TYPE_CHECKING:
    from mpi4py import MPI


def make(world: MPI.Intracomm) -> MPI.Intracomm:
    return mpi_library.own_comm(mpi_library.call_mpi("MPI_Comm_dup", world.Dup))


def main() -> None:
    hvd.init()
    print(f"pid {os.getpid()}", flush=True)
    older = make(mpi_world.world_comm())
    for _ in range(100):  # in all places that are free below
        make(older)
    mpi_world.shrink()  # nobody has died, but it is another communicator now
    try:
        if hvd.rank() == 1:
            time.sleep(0.5)  # the others wait in there
            os.kill(os.getpid(), signal.SIGKILL)
        make(older)
    except HorovodInternalError:
        mpi_library.revoke_all()
        engine.restart(mpi_world.shrink, idle=False)
    make(mpi_world.world_comm())
    print(f"made with {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
