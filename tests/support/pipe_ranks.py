"""Ranks without MPI: processes that talk over pipes, so that one can be killed and no mpirun ends the others for it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.single import SingleTransport

Pipe = Connection  # to one other rank; both ends are open for both directions


class PipeTransport(SingleTransport):
    """The collectives that the ranks of a host need to open shared memory; for little data."""

    name = "pipes"

    def __init__(self, rank: int, pipes: dict[int, Pipe[Any, Any]]) -> None:
        super().__init__()
        self.rank, self.size, self._pipes = rank, len(pipes) + 1, pipes

    def _exchange(self, data: bytes) -> list[bytes]:
        for pipe in self._pipes.values():
            pipe.send_bytes(data)
        return [data if rank == self.rank else self._pipes[rank].recv_bytes() for rank in range(self.size)]

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport.allgather."""
        out = make_buffer(sum(counts), buffer.dtype)
        out.array[:] = np.frombuffer(b"".join(self._exchange(buffer.array.tobytes())), out.array.dtype)
        return out

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport.broadcast."""
        buffer.array[:] = np.frombuffer(self._exchange(buffer.array.tobytes())[root], buffer.array.dtype)

    def barrier(self) -> None:
        """See Transport.barrier."""
        self._exchange(b"")


def run_piped(size: int, body: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call `body(transport, *args)` in `size` new processes; what each returned, None for those that were killed.

    Raises AssertionError with the tracebacks if any raised, or did not answer within `timeout` seconds.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # which takes seconds, once and not in each process
    pipes: list[dict[int, Pipe[Any, Any]]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            pipes[one][other], pipes[other][one] = context.Pipe()
    answers = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_serve, args=(answers[rank][1], rank, pipes[rank], body, args)) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for ends in [*(list(each.values()) for each in pipes), [answer[1] for answer in answers]]:
            for end in ends:
                end.close()
        deadline = time.monotonic() + timeout
        received = [_receive(answer[0], deadline) for answer in answers]
    finally:
        for process in processes:
            process.kill()
            process.join()
    raised = [f"--- rank {rank}\n{text}" for rank, (succeeded, text) in enumerate(received) if not succeeded]
    if raised:
        raise AssertionError("\n".join(raised))
    return [value for _, value in received]


def _receive(answer: Any, deadline: float) -> tuple[bool, Any]:
    if not answer.poll(max(0.0, deadline - time.monotonic())):
        return False, "no answer in time"
    try:
        succeeded, value = answer.recv()
    except EOFError:
        return True, None
    return succeeded, value


def _serve(answer: Any, rank: int, pipes: dict[int, Pipe[Any, Any]], body: Callable[..., Any], args: Any) -> None:
    try:
        answer.send((True, body(PipeTransport(rank, pipes), *args)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
