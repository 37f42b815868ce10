"""Horovod in processes of its own, which stand still while others have their turn.

In hvdkit's processes two engines would share one MPI, and Horovod's thread, which looks for work a thousand times a
second, would take time from everyone else.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hvdkit.torch as hvd
from hvdkit.launch.agent.rank import die_with_parent

_START_S = 60.0


def why_not() -> str:
    """What keeps Horovod out of a comparison here; "" if nothing does."""
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed, so it is not in the table."
    if hvd.cross_size() > 1:
        return "Horovod's ranks are started on one host only, so it is not in the table."
    return ""


class HorovodJob:
    """One rank of Horovod beside each of hvdkit's; opened, called and closed by all of these together.

    A rank of Horovod runs only during a call. threads: that it computes with.
    """

    def __init__(self, threads: int = 1) -> None:
        directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "")
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(directory, str(hvd.rank()))))
            listener.listen()
            listener.settimeout(_START_S)
            hvd.barrier()
            if hvd.rank() == 0:
                self._process = _start(directory)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                raise RuntimeError(f"No rank of Horovod has come up within {_START_S:g} s; see its output.") from None
        self._rank: Connection[Any, Any] = Connection(accepted.detach())
        self._pid: int = self._rank.recv()
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(directory)
        self.call("torch:set_num_threads", threads)

    def call(self, function: str, *arguments: Any) -> Any:
        """What "module:function" returns on Horovod's rank beside this one, which sleeps meanwhile."""
        os.kill(self._pid, signal.SIGCONT)
        self._rank.send((function, arguments))
        try:
            result = self._rank.recv()
        except EOFError:
            raise RuntimeError(f"Horovod's rank {hvd.rank()} has ended in {function}; see its output.") from None
        os.kill(self._pid, signal.SIGSTOP)
        return result

    def close(self) -> None:
        """End Horovod's ranks."""
        os.kill(self._pid, signal.SIGCONT)
        self._rank.send(None)
        self._rank.close()
        if self._process is not None:
            self._process.wait()


def _start(directory: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.horovod_rank", directory]
    return subprocess.Popen(
        [sys.executable, "-m", "hvdkit.launch", "-np", str(hvd.size()), *command],
        preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),
    )
