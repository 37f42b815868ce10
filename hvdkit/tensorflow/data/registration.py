"""Registration of dispatchers and workers of tf.data service, for which training ranks wait.

A server on rank 0 of the compute job. Requests and answers are JSON in the frames of hvdkit.handshake; a client
first proves that it knows the key, which is in the file that the compute job writes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdkit.config import read_environment
from hvdkit.handshake import Session, open_connection
from hvdkit.transport.addresses import address_of, address_towards, list_addresses, read_interface
from hvdkit.transport.handshakes import Handshakes

_PURPOSE = b"tf.data service"
_FRAME = b"J"
_LOOK_S = 1.0
_CONNECT_S = 5.0
_MARGIN_S = 10.0  # for an answer, beyond the time for which the other side may wait
_CLOSE_S = 5.0
_ELSEWHERE = "192.0.2.1"  # of the range for examples (RFC 5737): no packet is sent to it
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class ComputeService:
    """The server of registrations.

    dispatchers: number that will register.
    workers_per_dispatcher: number that will register.
    key: at least 16 random bytes.
    nics: interfaces whose addresses are published; None for all of this host.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Sequence[str] | None = None
    ) -> None:
        for name, number in (("dispatchers", dispatchers), ("workers per dispatcher", workers_per_dispatcher)):
            if number < 1:
                raise ValueError(f"{number} {name} are too few. There must be one or more.")
        self._workers_per_dispatcher, self._key = workers_per_dispatcher, key
        self._own = [address_of(name) for name in nics] if nics else _list_own_addresses()
        self._addresses: list[str | None] = [None] * dispatchers
        self._workers: list[set[int]] = [set() for _ in range(dispatchers)]
        self._ended_dispatchers: set[int] = set()
        self._ended = False
        self._changed = threading.Condition()
        self._serving: set[threading.Thread] = set()
        self._listener = socket.create_server(("", 0), backlog=128)
        threading.Thread(target=self._accept, name="hvdkit tf.data registration", daemon=True).start()

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """The addresses of this host and the port, in Horovod's form: by interface, whose name is not used."""
        port = int(self._listener.getsockname()[1])
        return {"all": [(address, port) for address in self._own]}

    def shutdown(self) -> None:
        """Release all clients that wait for the end, and close."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(); close() alone does not
        self._listener.close()
        for thread in list(self._serving):
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)

    def _accept(self) -> None:
        handshakes = Handshakes(self._listener, self._key, _PURPOSE)
        try:
            while not self._ended:
                for proven, connection in handshakes.go_on(_LOOK_S):
                    thread = threading.Thread(target=self._serve, args=(connection, proven.session), daemon=True)
                    self._serving.add(thread)
                    thread.start()
        finally:
            handshakes.close()

    def _serve(self, connection: socket.socket, session: Session) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError):  # the client disconnects, or sends invalid data
                payload = receive_frame(connection, session)
                connection.sendall(session.seal(_FRAME, json.dumps(self._answer(payload)).encode()))
        finally:
            self._serving.discard(threading.current_thread())

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": self._do(request)}
        except TimeoutError as error:
            return {"timeout": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"error": str(error)}

    def _do(self, request: Mapping[str, Any]) -> Any:
        call, seconds = request["call"], request.get("timeout")
        if call == "shutdown":
            threading.Thread(target=self.shutdown, daemon=True).start()
            return None
        if call == "wait_for_shutdown":
            self._wait(lambda: self._ended, None, "")
            return None
        number = int(request["dispatcher"])
        if not 0 <= number < len(self._addresses):
            raise ValueError(
                f"There is no dispatcher {number}: this service has {len(self._addresses)}, counted from 0. With more "
                "than one dispatcher start as many training ranks as there are dispatchers."
            )
        if call == "register_dispatcher":
            self._register(number, str(request["address"]))
        elif call == "wait_for_dispatcher":
            self._wait(lambda: self._addresses[number] is not None, seconds, f"dispatcher {number} has not registered")
            return self._addresses[number]
        elif call == "register_worker":
            with self._changed:
                self._workers[number].add(int(request["worker"]))
                self._changed.notify_all()
        elif call == "wait_for_workers":
            workers, most = self._workers[number], self._workers_per_dispatcher
            self._wait(lambda: len(workers) >= most, seconds, f"dispatcher {number} has not all its {most} workers")
        elif call == "unregister_worker":
            with self._changed:
                self._workers[number].discard(int(request["worker"]))
                self._changed.notify_all()
            if request.get("stay"):
                self._wait(lambda: self._ended, None, "")
        elif call == "wait_for_end":
            self._wait(lambda: self._ended or number in self._ended_dispatchers, None, "")
            return self._ended
        elif call == "end_dispatcher":
            with self._changed:
                self._ended_dispatchers.add(number)
                self._changed.notify_all()
            workers = self._workers[number]
            self._wait(lambda: self._ended or not workers, seconds, f"workers of dispatcher {number} have not ended")
        else:
            raise ValueError(f"{call!r} is not a request. Both jobs must have the same hvdkit.")
        return None

    def _register(self, number: int, address: str) -> None:
        with self._changed:
            if self._addresses[number] not in (None, address):
                raise ValueError(
                    f"Dispatcher {number} is registered at {self._addresses[number]} already, and now at {address}. "
                    "Start a compute job for each training job."
                )
            self._addresses[number] = address
            self._changed.notify_all()

    def _wait(self, true: Callable[[], bool], seconds: float | None, problem: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: true() or self._ended, seconds)
            if true():
                return
        if self._ended:
            raise ValueError(f"The compute service was shut down while {problem}.")
        raise TimeoutError(f"After {seconds:g} s {problem}. See the output of both jobs, or raise the timeout.")


class ComputeClient:
    """A client of the server. Errors: ConnectionError without an answer, TimeoutError, ValueError for a wrong request.

    compute_addresses, key: of the configuration. verbose: Horovod's, not used.
    """

    def __init__(
        self, compute_addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes, verbose: int = 1
    ) -> None:
        places = ((str(one[0]), int(one[1])) for each in compute_addresses.values() for one in each)
        self._places = list(dict.fromkeys(places))
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register the address of a dispatcher."""
        self._ask("register_dispatcher", dispatcher=dispatcher_id, address=dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait for a dispatcher, and return its address."""
        return str(self._ask("wait_for_dispatcher", timeout, dispatcher=dispatcher_id))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker that has started."""
        self._ask("register_worker", dispatcher=dispatcher_id, worker=worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of a dispatcher."""
        self._ask("wait_for_workers", timeout, dispatcher=dispatcher_id)

    def end_dispatcher(self, dispatcher_id: int, timeout: float) -> None:
        """Make the workers of a dispatcher end before it does; otherwise they would end only after a long time."""
        self._ask("end_dispatcher", timeout, dispatcher=dispatcher_id)

    def wait_for_end(self, dispatcher_id: int) -> bool:
        """Wait, without limit, until a dispatcher is about to end or shutdown() is called; True for the latter."""
        return bool(self._ask("wait_for_end", None, endless=True, dispatcher=dispatcher_id))

    def unregister_worker(self, dispatcher_id: int, worker_id: int, *, stay: bool = False) -> None:
        """Unregister a worker that has ended. stay: then wait until shutdown() is called, perhaps at once."""
        self._ask("unregister_worker", None, endless=stay, dispatcher=dispatcher_id, worker=worker_id, stay=stay)

    def shutdown(self) -> None:
        """End the compute job."""
        self._ask("shutdown")

    def wait_for_shutdown(self) -> None:
        """Wait, without limit, until shutdown() is called."""
        self._ask("wait_for_shutdown", None, endless=True)

    def find_own_address(self) -> str:
        """Return the address of this host from which it reaches the service, and others reach it."""
        connection, _ = self._connect()
        with connection:
            return str(connection.getsockname()[0])

    def _ask(self, call: str, timeout: float | None = 0.0, *, endless: bool = False, **arguments: Any) -> Any:
        connection, session = self._connect()
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):  # not on every system
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.settimeout(None if endless else (timeout or 0.0) + _MARGIN_S)
            request = {"call": call, "timeout": timeout, **arguments}
            connection.sendall(session.seal(_FRAME, json.dumps(request).encode()))
            try:
                answer = receive_frame(connection, session)
            except OSError as error:
                raise ConnectionError(f"The compute service has gone away: {error}. See its job's output.") from None
        if "timeout" in answer:
            raise TimeoutError(answer["timeout"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["answer"]

    def _connect(self) -> tuple[socket.socket, Session]:
        problems: list[str] = []
        for address, port in self._places:
            found = self._try(address, port, problems)
            if found is not None:
                return found
        raise ConnectionError(
            f"The compute service does not answer ({'; '.join(problems) or 'no address'}). It has ended, or "
            "its file is that of an earlier one: start the compute job first, and remove old files."
        )

    def _try(self, address: str, port: int, problems: list[str]) -> tuple[socket.socket, Session] | None:
        try:
            return open_connection(address, port, self._key, _PURPOSE, timeout_s=_CONNECT_S)
        except OSError as error:
            problems.append(f"{address} port {port}: {error}")
        return None


def _list_own_addresses() -> list[str]:
    """List the addresses of this host: first that of hvdrun's chosen interface, else that of the default route.

    Clients use the first one that answers; on this host all do, also those of a container engine.
    """
    interface = read_interface(read_environment())
    return list_addresses(address_of(interface) if interface else address_towards(_ELSEWHERE))


def receive_frame(connection: socket.socket, session: Session) -> dict[str, Any]:
    """Read the next frame, an object in JSON. Raises OSError, ValueError for anything else."""
    while True:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        for _, payload in session.receive(data):
            found = json.loads(payload)
            if not isinstance(found, dict):
                raise ValueError(f"{payload[:80]!r} is not an object")
            return found
