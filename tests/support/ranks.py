"""Run a function on several MPI ranks of this machine, from a test: `results = run_ranks(3, body, 42)`.

The ranks stay for the next call that asks for as many, since starting MPI and importing a framework cost seconds; after
a failure or a timeout new ones are started.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from rank_job import Job

_KEPT = 4  # jobs that wait for more work at the same time: ten ranks, of 1 to 4, in the usual tests
_START_S = 60.0  # for new ranks to start and to import frameworks, on a busy machine
_GRACE_S = 2.0  # for the other ranks to say something too, once one has failed
#: By number of ranks and backend of Keras; the one used last at the end.
_jobs: dict[tuple[int, str], Job] = {}
#: Those that made room for others, and end while the others start.
_ending: list[Job] = []


class _Answers:
    """What has come back so far, by rank."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.tracebacks: dict[int, str] = {}
        self.ended: set[int] = set()


class RanksFailedError(AssertionError):
    """Some ranks raised, ended or did not answer in time.

    tracebacks: of the ranks that raised. ended: ranks that are gone without an answer. silent: ranks that were still
    busy, with their stacks. results: of the others. output: what the ranks printed. status: mpirun's exit status.
    """

    def __init__(
        self, size: int, answers: _Answers, silent: Mapping[int, str], output: str, status: int | None
    ) -> None:
        self.tracebacks, self.ended, self.results = answers.tracebacks, sorted(answers.ended), answers.results
        self.silent, self.output, self.status = dict(silent), output, status
        parts = [f"{len(answers.results)} of {size} ranks succeeded; mpirun's status {status}"]
        parts += [f"--- rank {rank} raised\n{text}" for rank, text in sorted(self.tracebacks.items())]
        parts += [f"--- rank {rank} ended without an answer" for rank in self.ended]
        parts += [f"--- rank {rank} was still busy in\n{text}" for rank, text in sorted(self.silent.items())]
        parts += [f"--- output of the ranks\n{output}"] if output else []
        super().__init__("\n".join(parts))


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    backend: str = "",
    fresh: bool = False,
    grace: float = _GRACE_S,
    start: float = _START_S,
    **kwargs: Any,
) -> list[Any]:
    """Call `body` on `size` ranks and return what each returned, in rank order.

    body: a function of a module, importable; it and its arguments and results are pickled.
    transport: a name in openers.OPENERS; the body's first argument is then that transport, opened once a job.
    env: more variables for the ranks; they then are fresh. backend: that Keras runs on, there is one a process.
    fresh: processes of its own, started and ended here, for bodies that end ranks or leave things behind.
    timeout, grace: in seconds, for all ranks to answer, and for the rest of them once one has failed. start: for
    new ranks more.
    Raises RanksFailedError showing tracebacks, the stacks of ranks that hang, and the output; all ranks are ended then.
    """
    own = fresh or env is not None
    is_new = own or (size, backend) not in _jobs
    job = Job(size, {**_keras(backend), **(env or {})}) if own else _take(size, backend)
    seen = job.log.position()
    engine = {**os.environ, **(env or {})}.get("HVDKIT_ENGINE", "")  # a process may have another in its next world
    task = pickle.dumps((engine, transport, body, args, kwargs))
    answers = _Answers()
    try:
        for connection in job.connections.values():
            connection.send((sys.path, task))
        _collect(job.connections, answers, time.monotonic() + timeout + start * is_new, grace)
        if len(answers.results) == size:
            return [answers.results[rank] for rank in range(size)]
        if not own:
            del _jobs[size, backend]
        own = True
        silent = job.stacks(set(job.connections) - set(answers.results) - set(answers.tracebacks) - answers.ended)
        status = job.kill(patience_s=grace if answers.ended else 0.0)
        raise RanksFailedError(size, answers, silent, job.log.text(seen), status)
    finally:
        if own:
            job.close()


def _collect(connections: Mapping[int, Connection[Any, Any]], answers: _Answers, deadline: float, grace: float) -> None:
    ranks = {connection: rank for rank, connection in connections.items()}
    waiting = set(ranks)
    failed = False
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            waiting.discard(connection)
            rank = ranks[connection]
            try:
                succeeded, answer = connection.recv()
            except (EOFError, OSError):
                answers.ended.add(rank)
            else:
                if succeeded:
                    answers.results[rank] = pickle.loads(answer)
                else:
                    answers.tracebacks[rank] = answer
        if not failed and (answers.tracebacks or answers.ended):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)


def _keras(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"} if backend else {}


def _take(size: int, backend: str) -> Job:
    job = _jobs.pop((size, backend), None)
    if job is not None and not job.alive:
        job.kill()
        job = None
    if job is None:
        job = Job(size, _keras(backend))
    _jobs[size, backend] = job
    if len(_jobs) > _KEPT:
        while _ending:
            _ending.pop().close()
        _ending.append(_jobs.pop(next(iter(_jobs))))
        _ending[0].end()
    return job


@atexit.register
def close_all() -> None:
    """End the ranks that wait for more work."""
    _ending.extend(_jobs.values())
    _jobs.clear()
    for job in _ending:
        job.end()
    while _ending:
        _ending.pop().close()
