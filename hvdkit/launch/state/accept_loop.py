"""The accept loop of every asyncio server of hvdkit, with a limit on unauthenticated connections.

At the limit, one is dropped for the next connection, see hvdkit.unproven, after at most GRACE_S, in which a process of
the job answers. If the limit is low, because the process may open few files, that time is shorter: a full queue of the
system is accepted within QUEUE_S, which is less than an agent waits (CONNECT_S). asyncio.start_server has no limit:
clients can take all descriptors, and each connection without a descriptor prints a traceback to stderr.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence

from hvdkit.launch.state.waiting import ChangeEvent
from hvdkit.unproven import Unproven

GRACE_S = 0.5
QUEUE_S = 4.0
_PAUSE_S = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class AcceptLoop:
    """Accepts connections, and runs `serve` in a task for each, which is cancelled to drop it.

    serve: the connection is closed when it returns, or raises OSError, EOFError or TimeoutError.
    most: number of connections at a time that have not called prove(); at most a quarter of the files that this process
    may open, but never less than `least`.
    backlog: number of connections in the system's queue.
    least: number of connections that the job itself may need.
    limit: size of the reader's buffer, in bytes.
    """

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        most: int,
        backlog: int,
        *,
        least: int = 1,
        limit: int = 1 << 16,
    ) -> None:
        self._serve, self._least, self._backlog, self._limit = serve, least, backlog, limit
        self._grace_s = GRACE_S
        self._accepting: list[asyncio.Task[None]] = []
        self._unproven: Unproven[asyncio.Task[None]] = Unproven(most)
        self._proven: set[asyncio.Task[None]] = set()
        self._fewer = ChangeEvent()
        self.sockets: list[socket.socket] = []

    def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Make the system queue connections at these bound sockets, which stop() closes."""
        for one in sockets:
            one.setblocking(False)
            one.listen(self._backlog)
        self.sockets = list(sockets)

    def start(self) -> None:
        """Begin to accept; to be called in the loop."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            self._unproven.most = max(self._least, min(self._unproven.most, files // 4))
        self._grace_s = min(GRACE_S, QUEUE_S * self._unproven.most / self._backlog)
        self._accepting = [asyncio.create_task(self._accept(one)) for one in self.sockets]

    def prove(self) -> None:
        """Mark the current task's connection as the job's: it is not dropped, and does not count."""
        task = asyncio.current_task()
        assert task is not None
        if self._unproven.remove(task):
            self._proven.add(task)
            self._fewer.set()

    async def wait_until_idle(self, seconds: float) -> None:
        """Wait until no proven connection is open, for `seconds` at most."""
        if self._proven:
            await asyncio.wait(self._proven, timeout=seconds)

    def stop(self) -> None:
        """Stop listening; connections stay open. To be called in the loop."""
        for one in self.sockets:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self.sockets = []
        for task in self._accepting:
            task.cancel()

    async def close(self) -> None:
        """Stop listening, and drop every connection."""
        self.stop()
        for task in (*self._unproven, *self._proven):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._unproven, *self._proven, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while await self._make_room():
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # the client has disconnected, or no descriptor is free
                if error.errno in _FULL:
                    self._drop(len(self._unproven) // 2 + 1)
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._run(connection))
            self._unproven.add(task, address, loop.time())
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)

    async def _make_room(self) -> bool:
        """Wait until another connection may be accepted; False after stop(), whose cancel() wait_until() may lose."""
        while self.sockets and self._unproven.full:
            (next_one,) = self._unproven.choose()
            left = self._unproven.since(next_one) + self._grace_s - asyncio.get_running_loop().time()
            if left <= 0:
                next_one.cancel()
                left = self._grace_s
            await self._fewer.wait_until(lambda: not self._unproven.full, left)
        return bool(self.sockets)

    def _drop(self, count: int) -> None:
        for task in self._unproven.choose(count):
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.remove(task)
        self._proven.discard(task)
        self._fewer.set()

    async def _run(self, connection: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=self._limit)
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            if writer is not None and asyncio.current_task() in self._unproven:
                writer.transport.abort()  # otherwise it stays open until the answer is read, perhaps never
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # the client is no process of the job, or has disconnected
        finally:
            if writer is None:
                connection.close()
            else:
                writer.close()
