"""Lines of the ranks on the driver: `stdout` and `stderr` of run(), as in horovod.spark.run.

The driver listens for the tasks, which prove the job's secret and send each line as their rank writes it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.handshake import AuthenticationError, open_connection
from hvdkit.launch.state.authenticated_server import AuthenticatedServer, Channel, ServerThread
from hvdkit.log import logger
from hvdkit.transport.addresses import is_loopback

_PURPOSE = b"output"  # of the handshake
OUT, ERROR = b"O", b"E"  # kinds of frames, each a line with the rank in front
_CONNECT_S = 10.0
_GRACE_S = 2.0  # after the end of the job, to read connections to their end


@dataclass
class Output:
    """The streams for lines: objects with write(text); None for no stream.

    timestamps: put the driver's time in front.
    """

    stdout: Any = None
    stderr: Any = None
    timestamps: bool = False

    def check(self, function: str) -> None:
        """Raise LaunchError for a stream that has no write()."""
        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            if stream is not None and not callable(getattr(stream, "write", None)):
                raise LaunchError(
                    f"hvdkit_spark.{function}({name}={stream!r}) has no write(). Give {name} a file that is open for "
                    f"text, for example sys.{name}.",
                    code="spark-output-invalid",
                )
        if self.timestamps and self.stdout is None and self.stderr is None:
            raise LaunchError(
                f"hvdkit_spark.{function}(prefix_output_with_timestamp=True) has no output: the lines of ranks come to "
                "the driver with stdout=sys.stdout and stderr=sys.stderr only. Set one of them, or leave it out.",
                code="spark-needs-output",
            )

    @contextlib.contextmanager
    def receive(self, driver: str, secret: str) -> Iterator[int]:
        """Write the lines that tasks send while this is open; yields the port to connect to.

        The port is 0 if no stream is given.
        driver: a host name or address of this machine that all executors reach.
        Raises LaunchError if no port is free.
        """
        if self.stdout is None and self.stderr is None:
            yield 0
            return
        server = AuthenticatedServer(secret.encode(), _PURPOSE, self._read)
        port = server.listen_tcp([_resolve(driver)])
        thread = ServerThread(server, "hvdkit-spark-output")
        try:
            yield port
        finally:
            thread.close(_GRACE_S)

    async def _read(self, channel: Channel) -> None:
        try:
            while True:
                kind, line = await channel.read()
                self._write(self.stdout if kind == OUT else self.stderr, line.decode(errors="replace"))
        except AuthenticationError as error:
            logger.warning("Lines of task %d are missing: its connection failed: %s.", channel.rank, error)

    def _write(self, stream: Any, line: str) -> None:
        if stream is None:
            return
        moment = time.strftime("%Y-%m-%d %H:%M:%S ") if self.timestamps else ""
        try:
            stream.write(moment + line)
            if hasattr(stream, "flush"):
                stream.flush()
        except Exception as error:  # a closed or binary file, or any error of the user's object
            logger.error("Lines of ranks cannot be written to %r, and are lost: %s", stream, error)
            self.stdout = None if self.stdout is stream else self.stdout
            self.stderr = None if self.stderr is stream else self.stderr


class LineSender:
    """Sends the lines of a task's rank to the driver. Raises OSError if the driver cannot be reached."""

    def __init__(self, driver: str, port: int, secret: str, index: int) -> None:
        self._lock = threading.Lock()  # stdout and stderr have a thread each
        self._connection: socket.socket | None
        self._connection, self._session = open_connection(
            driver, port, secret.encode(), _PURPOSE, index, timeout_s=_CONNECT_S
        )

    def send(self, kind: bytes, line: str) -> None:
        """Send a line. If the driver has gone, this and all later ones are dropped."""
        with self._lock:
            if self._connection is None:
                return
            try:
                self._connection.sendall(self._session.seal(kind, line.encode()))
            except OSError as error:
                sys.stderr.write(f"hvdkit: lines no longer reach the driver: {error}\n")
                self._close()

    def close(self) -> None:
        """Close the connection after all lines are sent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _resolve(host: str) -> str:
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return "0.0.0.0"  # of a gateway in front of this machine
    # Debian gives a host 127.0.1.1 for its own name, and other hosts another address.
    named = is_loopback(address) and host not in ("localhost", address)
    return "0.0.0.0" if named else address
