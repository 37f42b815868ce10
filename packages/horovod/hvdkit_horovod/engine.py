"""Named operations in Horovod's core: an alternative to NamedEngine in which Horovod negotiates the operations."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hvdkit.engine.api import (
    JOIN,
    JOINING,
    SHUT_DOWN,
    Action,
    Backoff,
    Engine,
    Joining,
    Operation,
    OperationRequest,
    Transport,
    check_refused,
    gather_bytes,
)
from hvdkit.errors import HorovodInternalError
from hvdkit_horovod.operations import Running, collect, start_operation
from hvdkit_horovod.transport import HorovodTransport


class HorovodEngine(Engine):
    """The Engine of a process set of Horovod's; opened and closed by all of its ranks together.

    transport: transport of that set.
    hosts, ranks, job_ranks: see Engine.
    Horovod itself reports stalls.
    """

    transport: HorovodTransport
    stopped = False  # Horovod ends operations by itself

    def __init__(
        self,
        transport: Transport,
        *,
        hosts: Sequence[str],
        ranks: Sequence[int],
        job_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(hosts, ranks, job_ranks)
        assert isinstance(transport, HorovodTransport)
        self.transport, self.joining = transport, Joining()
        self.takes_tensors = transport.binding.framework == "torch"
        self.most_names = transport.binding.most_names
        self._running: dict[str, Running] = {}
        self._lock = threading.RLock()
        self._closed = False

    def submit(self, name: str, request: OperationRequest, buffers: Sequence[Any]) -> Operation:
        operation = Running(name, request, buffers)
        with self._lock:
            self._check_open()
            if name in self._running:
                self._take(self._running[name])  # done, but not collected yet
            if name in self._running:
                raise self.duplicate(name)
            start_operation(self.transport, operation)
            self._running[name] = operation
        return operation

    def do(
        self, name: str, request: OperationRequest, buffers: Sequence[Any], *, action: Action | None = None
    ) -> Operation:
        if request.kind in _COLLECTIVES:
            operation = self.submit(name, request, buffers)
            self.wait(operation)
            return operation
        self._check_open()
        operation = Operation(name, request, buffers)
        with self.transport.within(name):
            if request.kind not in _OF_HOROVOD:
                self._agree(name, request)
            if action is not None:
                operation.outcome = action(self.transport, ())
        operation.done = True
        return operation

    def _agree(self, name: str, request: OperationRequest) -> None:
        """Wait until all ranks have reached the same operation.

        Horovod does not compare these, so the ranks exchange them.
        """
        mine = f"{request.kind} {dict(request.options)}"
        steps = [step.decode() for step in gather_bytes(self.transport, mine.encode())]
        if len(set(steps)) > 1:
            differences = "; ".join(f"{self.who(rank)}: {step}" for rank, step in enumerate(steps))
            raise HorovodInternalError(f"The ranks called different operations as {name}: {differences}.")

    def wait(self, operation: Operation) -> None:
        check_refused()
        backoff = Backoff()
        while not (operation.done or self._take(operation)):
            backoff.pause()
        if operation.error is not None:
            raise operation.error

    def drive(self) -> bool:
        return sum(map(self._take, list(self._running.values()))) > 0

    def _take(self, operation: Any) -> bool:
        with self._lock:
            if operation.done or not all(call.done() for call in operation.requests):
                return False
            try:
                collect(self.transport, operation)
            except HorovodInternalError as error:
                operation.error = type(error)(f"{operation.name}: {error}")
            self._running.pop(operation.name, None)
            operation.done = True
        return True

    def join(self) -> Operation:
        """Begin to join the others' allreduces with zeros until all ranks have joined.

        In the set of all ranks it is Horovod's own join, for allreduces and barriers. In other sets it has no effect.
        """
        self._check_open()
        operation = Running(JOIN, JOINING, ())
        if self.transport.process_set.process_set_id:
            operation.done = True
        else:
            operation.requests = [self.transport.binding.join()]
            self._running[JOIN] = operation
        return operation

    def _check_open(self) -> None:
        check_refused()
        if self._closed:
            raise HorovodInternalError(SHUT_DOWN)

    def leave(self, why: str) -> None:
        """Refuse further operations; Horovod notifies the others when this process ends."""
        self._closed = True

    def close(self, *, idle: bool = True) -> None:
        self._closed = True
        self.transport.close()


_COLLECTIVES = frozenset({"allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"})
#: Operations in which Horovod itself synchronises all ranks.
_OF_HOROVOD = frozenset({"add_process_set"})
