"""hvdrun --metrics-port: GET /metrics for Prometheus, over HTTP on the loopback address of hvdrun's host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.metrics_text import CONTENT_TYPE, format_metrics
from hvdkit.launch.job.ranks import Ranks

ADDRESS = "127.0.0.1"
_LONGEST = 1 << 14  # of a request
_REQUEST_S = 5.0


class MetricsServer:
    """Answers GET /metrics with the metrics of the ranks, and any other request with an error.

    job: describes the job, with its name and, as "since", when it was started.
    """

    def __init__(self, ranks: Ranks, job: Callable[[], Mapping[str, Any]]) -> None:
        self._ranks, self._job = ranks, job
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self, port: int | None, note: Callable[[str], object]) -> None:
        """Begin to listen, and say where. port: 0 for any that is free; None not to listen.

        Raises LaunchError if the port cannot be had.
        """
        if port is None:
            return
        try:
            self._server = await asyncio.start_server(self._serve, ADDRESS, port, limit=_LONGEST)
        except OSError as error:
            raise LaunchError(
                f"--metrics-port {port}: hvdrun cannot listen there: {error.strerror}. Choose another port, or 0 for "
                "any that is free."
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        note(f"metrics for Prometheus at http://{ADDRESS}:{self.port}/metrics")

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_S)
            writer.write(self._answer(request.partition(b"\r\n")[0].split()))
            await asyncio.wait_for(writer.drain(), _REQUEST_S)
        except asyncio.TimeoutError:
            writer.transport.abort()  # else it would stay open until an answer is read that nobody reads
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # not HTTP, or it has disconnected
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, words: list[bytes]) -> bytes:
        method, path = [*words, b"", b""][:2]
        if path.partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "Only /metrics is here.\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "Only GET is allowed.\n")
        job = self._job()
        answer = _response("200 OK", format_metrics(self._ranks, job["name"], job["since"]), CONTENT_TYPE)
        return answer if method == b"GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _response(status: str, text: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
