"""A job's metrics in Prometheus' text format, version 0.0.4, over HTTP on the loopback address of hvdrun's host."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.state.accept_loop import AcceptLoop
from hvdkit.launch.state.ranks import Phase, Ranks, RankState
from hvdkit.launch.state.waiting import time_limit

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Name -> (type, help), in their order in the text.
METRICS = {
    "hvdkit_job_start_time_seconds": ("gauge", "When the job was started, in seconds since 1970."),
    "hvdkit_ranks": ("gauge", "Ranks that the job consists of."),
    "hvdkit_rank_running": ("gauge", "1 while the command of the rank runs and is not stopped, else 0."),
    "hvdkit_gradient_reductions_total": (
        "counter",
        "Reductions of gradients: steps, with one optimizer.",
    ),
    "hvdkit_gradient_wait_seconds_total": (
        "counter",
        "Seconds for which training waited for gradients. The others wait for the rank that waits least.",
    ),
    "hvdkit_reduced_bytes_total": ("counter", "Bytes of gradients that the rank has reduced."),
    "hvdkit_samples_total": ("counter", "Samples that the script has given to hvd.track()."),
    "hvdkit_logged": ("gauge", "The last average over all ranks of what the script has logged with hvd.track()."),
}

_RUNNING = (Phase.RUNNING, Phase.READY, Phase.CHANGING)


def format_metrics(ranks: Ranks, job: str, since: float) -> str:
    """Write the metrics of a job. job: its name. since: when it was started, in seconds since 1970."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in METRICS}
    samples["hvdkit_job_start_time_seconds"].append(({}, since))
    samples["hvdkit_ranks"].append(({}, len(ranks.expected)))
    for rank, state in sorted(ranks.states.items()):
        labels = {"rank": str(rank), "host": state.host}
        for name, value in _of_rank(state).items():
            samples[name].append((labels, value))
    samples["hvdkit_logged"] += [({"key": key}, value) for key, value in sorted(ranks.logged.items())]
    lines = []
    for name, (kind, text) in METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels({'job_name': job, **labels})} {_number(value)}" for labels, value in samples[name]]
    return "\n".join(lines) + "\n"


def _of_rank(state: RankState) -> dict[str, float]:
    metrics = {"hvdkit_rank_running": float(state.phase in _RUNNING and not state.paused_by)}
    totals = state.totals
    if totals is not None:
        metrics["hvdkit_gradient_reductions_total"] = totals.rounds
        if math.isfinite(totals.waited_s):  # not finite if a GPU's stream waits
            metrics["hvdkit_gradient_wait_seconds_total"] = totals.waited_s
        metrics["hvdkit_reduced_bytes_total"] = totals.nbytes
        metrics["hvdkit_samples_total"] = totals.samples
    return metrics


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escape(value)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


ADDRESS = "127.0.0.1"
_LONGEST = 1 << 14  # of a request
_REQUEST_S = 5.0
_MOST = 32  # connections at a time
_BACKLOG = 128


class MetricsServer:
    """Answers GET /metrics with the metrics of the ranks, and any other request with an error.

    job: describes the job, with its name and, as "since", when it was started.
    """

    def __init__(self, ranks: Ranks, job: Callable[[], Mapping[str, Any]]) -> None:
        self._ranks, self._job = ranks, job
        self._accept_loop: AcceptLoop | None = None
        self.port = 0

    async def open(self, port: int | None, note: Callable[[str], object]) -> None:
        """Begin to listen, and note the address. port: 0 for any free port; None not to listen.

        Raises LaunchError if the port is not available.
        """
        if port is None:
            return
        try:
            listener = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise LaunchError(
                f"--metrics-port {port}: hvdrun cannot listen there: {error.strerror}. Choose another port, or 0 for "
                "any that is free.",
                code="metrics-port-in-use",
            ) from None
        self._accept_loop = AcceptLoop(self._serve, _MOST, _BACKLOG, limit=_LONGEST)
        self._accept_loop.listen([listener])
        self._accept_loop.start()
        self.port = listener.getsockname()[1]
        note(f"metrics for Prometheus at http://{ADDRESS}:{self.port}/metrics")

    def close(self) -> None:
        """Stop listening."""
        if self._accept_loop is not None:
            self._accept_loop.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with time_limit(_REQUEST_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(request.partition(b"\r\n")[0].split()))
                writer.close()
                await writer.wait_closed()
        except asyncio.TimeoutError:
            writer.transport.abort()  # otherwise it would stay open until the client reads the answer, perhaps never
        except asyncio.LimitOverrunError:
            pass  # not HTTP

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
