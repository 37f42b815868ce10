"""What a rank of a test job does: call what it is sent, and answer with the result or the traceback."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
from without_tensorflow import hide_tensorflow

from hvdkit.transport.mpi import library
from hvdkit.world import read_world

_transports: dict[str, Any] = {}


def show_crashes() -> None:
    """Have a crash show the stacks of Python and, from the start of MPI on, Open MPI's stack of C functions.

    Open MPI installs its handler only where there is none; faulthandler raises the signal again for the one before.
    """
    start_mpi = library._start

    def start(mpi: Any) -> None:
        faulthandler.disable()
        try:
            start_mpi(mpi)
        finally:
            faulthandler.enable()

    library._start = start
    faulthandler.enable()


def serve(directory: str) -> None:
    """Work for the test that listens in `directory`, until it says None or is gone."""
    rank = read_world().rank
    hide_tensorflow()
    show_crashes()
    with Path(directory, f"stack{rank}").open("w") as stack, Client(str(Path(directory, "socket"))) as connection:
        connection.send((rank, os.getpid()))
        while True:
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                os._exit(1)  # the test has gone; the other ranks need not be waited for
            if message is None:
                break
            path, task = message
            sys.path[:] = path
            faulthandler.unregister(signal.SIGUSR1)  # the task before may have set a handler in its place
            faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
            connection.send(_answer(task))
    for transport in _transports.values():
        transport.close()


def _answer(task: bytes) -> tuple[bool, Any]:
    random.seed(0)
    np.random.seed(0)
    try:
        engine, transport, body, args, kwargs = pickle.loads(task)
        os.environ.pop("HVDKIT_ENGINE", None)
        if engine:
            os.environ["HVDKIT_ENGINE"] = engine
        given = (_open(transport),) if transport else ()
        return True, pickle.dumps(body(*given, *args, **kwargs))
    except BaseException:
        return False, traceback.format_exc()
    finally:
        sys.stdout.flush()


def _open(name: str) -> Any:
    from openers import OPENERS

    if name not in _transports:
        _transports[name] = OPENERS[name]()
    return _transports[name]
