"""The rendezvous store, in which rank 0 writes its address before ranks connect, and how launchers name it."""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hvdkit.errors import TransportError, WorldError
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import broadcast_bytes
from hvdkit.world import has_hvdruns_torch_variables

_ANSWER_S = 10.0


class RendezvousStore(Protocol):
    """Keeps values by key: what one rank puts, the others get. private: nobody else can read it."""

    private: bool

    def put(self, key: str, value: bytes) -> None:
        """Store a value, in place of an older one."""

    def get(self, key: str) -> bytes | None:
        """The value that was put last; None if there is none. It may be from processes that have ended."""


@dataclass(frozen=True)
class StoreLocation:
    """Where the rendezvous store is.

    kind: "http" is horovodrun's, "store" torch's TCPStore, "mpi" is MPI itself. hosted: does rank 0 start it?
    """

    kind: Literal["http", "store", "mpi"]
    address: str = ""
    port: int = 0
    hosted: bool = False


def find_rendezvous_store(variables: Mapping[str, str], launcher: str) -> StoreLocation:
    """Read where the launcher has its rendezvous store. launcher: see World.

    Raises WorldError if the launcher should have said, and has not, or not well.
    """
    names: tuple[str, str]
    if launcher == "horovodrun":
        names = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
        return StoreLocation("http", *_read_place(variables, names, launcher))
    names = "MASTER_ADDR", "MASTER_PORT"
    users = all(variables.get(name) for name in names) and not has_hvdruns_torch_variables(variables)
    if launcher == "torchrun" or users:
        agents = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return StoreLocation("store", *_read_place(variables, names, launcher), hosted=not agents)
    return StoreLocation("mpi")


def _read_place(variables: Mapping[str, str], names: tuple[str, str], launcher: str) -> tuple[str, int]:
    address, port = (variables.get(name, "") for name in names)
    if address and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16:
        return address, int(port)
    raise WorldError(
        f"The rendezvous of the ranks needs {names[0]} and {names[1]}, which are {address!r} and {port!r} (launcher: "
        f"{launcher}). Start the script with torchrun, `horovodrun --gloo` or hvdrun. Or set both variables, to the "
        "host of rank 0 and to a free port on that host."
    )


class HttpRendezvousStore:
    """horovodrun's own: PUT and GET of /scope/key, by whoever reaches its port. Proxies are not asked."""

    private = False

    def __init__(self, address: str, port: int) -> None:
        self._place = address, port

    def put(self, key: str, value: bytes) -> None:
        """See RendezvousStore.put. Raises TransportError."""
        status, _ = self._ask("PUT", key, value)
        if status != 200:
            raise TransportError(f"horovodrun's rendezvous server at {self._place} answered PUT with status {status}.")

    def get(self, key: str) -> bytes | None:
        """See RendezvousStore.get. Raises TransportError."""
        status, value = self._ask("GET", key)
        return value if status == 200 else None

    def _ask(self, method: str, key: str, value: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._place, timeout=_ANSWER_S)
        try:
            connection.request(method, f"/hvdkit/{key}", value)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(
                f"horovodrun's rendezvous server at {self._place[0]}:{self._place[1]} cannot be reached: {error!r}. "
                f"Is horovodrun still running, and is HOROVOD_GLOO_RENDEZVOUS_ADDR reachable from this host?"
            ) from error
        finally:
            connection.close()


class TcpRendezvousStore:
    """See RendezvousStore: a TCPStore of torch's, which answers whoever reaches its port."""

    private = False

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        self._store.set(f"hvdkit/{key}", value)

    def get(self, key: str) -> bytes | None:
        name = f"hvdkit/{key}"
        return bytes(self._store.get(name)) if self._store.check([name]) else None


class TransportRendezvousStore:
    """A transport of the same ranks that there is already: put() and the others' first get() are one collective."""

    private = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._found: bytes | None = None

    def put(self, key: str, value: bytes) -> None:
        """See RendezvousStore.put; on rank 0."""
        broadcast_bytes(self._transport, value, 0)

    def get(self, key: str) -> bytes | None:
        """See RendezvousStore.get; on the others."""
        if self._found is None:
            self._found = broadcast_bytes(self._transport, b"", 0)
        return self._found
