"""The rendezvous of ranks that know only their launcher's store: rank 0 writes the address of its own store there.

An entry of a store that has ended (for example of ranks that torchrun has restarted) cannot be distinguished from a
fresh entry. But no process answers at its address, so the entry is read again until a store answers.
"""

from __future__ import annotations

import http.client
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from hvdkit.errors import RankLostError, TransportError, WorldError
from hvdkit.transport.addresses import LOOPBACK, address_of, is_loopback, list_addresses
from hvdkit.transport.api import Transport
from hvdkit.transport.gloo.library import host_store, join_store
from hvdkit.transport.gloo.store_timeout import request_from_rank_0, wait_for_store
from hvdkit.transport.polling import check_wait
from hvdkit.transport.small_collectives import broadcast_bytes
from hvdkit.world import has_hvdruns_torch_variables

Answer = TypeVar("Answer")

_PAUSE_S = 0.05
_ANSWER_S = 3.0
_HTTP_ANSWER_S = 10.0
_STORE_ANSWER_S = 120.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RendezvousStore(Protocol):
    """Keeps values by key, which one rank puts and others get. private: True if only the ranks can read it."""

    private: bool

    def put(self, key: str, value: bytes) -> None:
        """Store a value, and replace an older value."""

    def get(self, key: str) -> bytes | None:
        """Return the value that was put last; None if there is none. It may be from processes that have ended."""


@dataclass(frozen=True)
class StoreLocation:
    """The location of the rendezvous store.

    kind: "http" for horovodrun's, "store" for torch's TCPStore, "mpi" for MPI itself.
    address: its host; "" for "mpi".
    port: its TCP port; 0 for "mpi".
    hosted: True if rank 0 starts it.
    """

    kind: Literal["http", "store", "mpi"]
    address: str = ""
    port: int = 0
    hosted: bool = False


def find_rendezvous_store(variables: Mapping[str, str], launcher: str) -> StoreLocation:
    """Read the location of the launcher's rendezvous store from the variables. launcher: see World.

    Raises WorldError if the launcher's variables for it are missing or invalid.
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
    """horovodrun's store: PUT and GET of /scope/key, open to all that reach its port. It is used without a proxy."""

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
        connection = http.client.HTTPConnection(*self._place, timeout=_HTTP_ANSWER_S)
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
    """See RendezvousStore: a TCPStore of torch's, open to all that reach its port.

    owner: the process that serves it, for messages. Both methods raise TransportError if it does not answer.
    """

    private = False

    def __init__(self, store: Any, owner: str = "Rank 0") -> None:
        self._store, self._owner = store, owner

    def put(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(f"hvdkit/{key}", value))

    def get(self, key: str) -> bytes | None:
        name = f"hvdkit/{key}"
        return self._ask(lambda: bytes(self._store.get(name)) if self._store.check([name]) else None)

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        place, deadline = f"{self._store.host}:{self._store.port}", time.monotonic() + _STORE_ANSWER_S
        return wait_for_store(place, call, deadline=deadline, owner=self._owner)


class TransportRendezvousStore:
    """See RendezvousStore: uses a transport of the same ranks; put() and the others' first get() are one collective."""

    private = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._found: bytes | None = None

    def put(self, key: str, value: bytes) -> None:
        """See RendezvousStore.put; only on rank 0."""
        broadcast_bytes(self._transport, value, 0)

    def get(self, key: str) -> bytes | None:
        """See RendezvousStore.get; only on the other ranks."""
        if self._found is None:
            self._found = broadcast_bytes(self._transport, b"", 0)
        return self._found


@dataclass(frozen=True)
class RendezvousInfo:
    """The entry of rank 0 in the rendezvous store: its own store's addresses, best first, and a mark of this job.

    secret: of the job, in hex; "" if other processes can read the rendezvous store. The secret is then in rank 0's
    store, which they can read too.
    """

    addresses: tuple[str, ...]
    port: int
    mark: str
    secret: str = ""


@dataclass(frozen=True)
class RankInfo:
    """The entry of each rank in rank 0's store.

    host: name of its host.
    machine: identifier of its host, equal for ranks of one host.
    address: an address of its host; "" on rank 0 if no interface is selected.
    reached: the address by which the rank reached rank 0's store; "" on rank 0.
    """

    host: str
    machine: str
    address: str
    reached: str


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous.

    store: rank 0's store.
    hosts: name of each rank's host.
    nodes: the host number of each rank.
    address: the address of this rank that all other ranks reach.
    secret: of this job, the same on all ranks.
    """

    store: Any
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    address: str
    secret: bytes


def parse_rendezvous_info(data: bytes) -> RendezvousInfo:
    """Parse rank 0's entry in the rendezvous store. Raises TransportError for any other data."""
    found = _parse(data)
    addresses, port, mark, secret = (found.get(key) for key in ("addresses", "port", "mark", "secret"))
    if (
        isinstance(addresses, list)
        and all(isinstance(one, str) for one in addresses)
        and type(port) is int
        and 0 < port < 2**16
        and isinstance(mark, str)
        and isinstance(secret, str)
        and re.fullmatch(r"([0-9a-f]{64})?", secret)
    ):
        return RendezvousInfo(tuple(addresses), port, mark, secret)
    raise _strange(data)


def parse_rank_info(data: bytes) -> RankInfo:
    """Parse a rank's entry in rank 0's store. Raises TransportError for any other data."""
    found = _parse(data)
    words = [found.get(one.name) for one in fields(RankInfo)]
    if all(isinstance(one, str) for one in words):
        return RankInfo(*map(str, words))
    raise _strange(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _strange(data)
    return found


def _strange(data: bytes) -> TransportError:
    return TransportError(
        f"The rendezvous store contains {data[:100]!r}, which this version of hvdkit does not write. Do all ranks "
        "run the same version of hvdkit?"
    )


def find_peers(
    rendezvous_store: RendezvousStore,
    rank: int,
    size: int,
    *,
    name: str,
    host: str,
    interface: str,
    towards: str,
    secret: str = "",
    deadline: float,
) -> Rendezvous:
    """Find the other ranks; collective.

    rendezvous_store: the store that all ranks know.
    rank: this process's number.
    size: number of ranks.
    name: the key of this rendezvous.
    host: this host's name, for messages.
    interface: the network interface to use; "" for any.
    towards: the address of this host that other hosts most likely reach.
    secret: of the job, in hex, if all ranks have it already; then it is written to no store.
    deadline: on the clock of time.monotonic().
    Raises TransportError that names the missing ranks.
    """
    own = address_of(interface) if interface else ""
    if rank == 0:
        store, reached = host_store(), ""
        mark, own_secret = secrets.token_hex(16), secrets.token_hex(32)
        store.set("mark", mark)
        if not rendezvous_store.private and not secret:
            store.set("secret", own_secret)
        addresses = (own,) if own else tuple(list_addresses(towards))
        info = RendezvousInfo(addresses, store.port, mark, own_secret if rendezvous_store.private else "")
        rendezvous_store.put(name, json.dumps(asdict(info)).encode())
        address = own
    else:
        store, reached, address, own_secret = _find_store(rendezvous_store, name, rank, deadline)
        address = own or address
    told = json.dumps(asdict(RankInfo(host, _machine(), address, reached)))
    request_from_rank_0(store, store.set, f"rank/{rank}", told, deadline=deadline)
    everyone = [parse_rank_info(one) for one in collect(store, "rank", size, deadline)]
    machines = list(dict.fromkeys(one.machine for one in everyone))
    nodes = tuple(machines.index(one.machine) for one in everyone)
    return Rendezvous(
        store,
        tuple(one.host for one in everyone),
        nodes,
        own or choose_address(everyone, nodes, rank),
        bytes.fromhex(
            secret or own_secret or request_from_rank_0(store, store.get, "secret", deadline=deadline).decode()
        ),
    )


def choose_address(everyone: Sequence[RankInfo], nodes: Sequence[int], rank: int) -> str:
    """Return the address by which all other ranks reach a rank. Raises TransportError if there is none."""
    if len(set(nodes)) == 1:
        return LOOPBACK
    # Rank 0 has connected to no rank; the ranks on other hosts know an address that reaches it.
    found = everyone[rank].address or next(one.reached for one, node in zip(everyone, nodes, strict=True) if node)
    if is_loopback(found):
        raise TransportError(
            f"Rank {rank} on {everyone[rank].host} has published the address {found} only, which ranks on other "
            "hosts cannot reach. Set GLOO_SOCKET_IFNAME to the interface between the hosts, for example "
            "GLOO_SOCKET_IFNAME=eth0."
        )
    return found


def collect(store: Any, what: str, size: int, deadline: float) -> list[bytes]:
    """Return the value that each rank has set under "{what}/{rank}" in rank 0's store, by rank.

    Raises TransportError that names the ranks without a value at the deadline, or rank 0 if it does not answer.
    """
    keys = [f"{what}/{rank}" for rank in range(size)]

    def ask(call: Callable[[list[str]], Any], keys: list[str]) -> Any:
        return request_from_rank_0(store, call, keys, deadline=deadline)

    while not ask(store.check, keys):
        if time.monotonic() >= deadline:
            missing = [rank for rank in range(size) if not ask(store.check, [keys[rank]])]
            raise TransportError(
                f"{len(missing)} of {size} ranks have not arrived: {', '.join(map(str, missing))}. All ranks must "
                "call hvd.init(). See the output of these ranks, or of the launcher, for the cause."
            )
        check_wait()
        time.sleep(_PAUSE_S)
    return [bytes(one) for one in ask(store.multi_get, keys)]


def _find_store(rendezvous_store: RendezvousStore, name: str, rank: int, deadline: float) -> tuple[Any, str, str, str]:
    """Return rank 0's store, the address that reached it, this host's address towards it, and the job's secret."""
    seen = "rank 0 has not published the address of its store"
    while time.monotonic() < deadline:
        found = rendezvous_store.get(name)
        if found is not None:
            info = parse_rendezvous_info(found)
            for address in info.addresses:
                store, own = _try_store(address, info, deadline)
                if store is not None:
                    return store, address, own, info.secret
                seen = f"its store at {address}:{info.port} cannot be reached ({own})"
        check_wait()
        time.sleep(_PAUSE_S)
    raise TransportError(f"Rank {rank} cannot reach rank 0: {seen}. See the output of rank 0 for the cause.")


def _try_store(address: str, info: RendezvousInfo, deadline: float) -> tuple[Any, str]:
    """Return the store and this host's address towards it; None and the reason if it cannot be reached."""
    try:
        with socket.create_connection((address, info.port), timeout=_ANSWER_S) as probe:
            own = str(probe.getsockname()[0])
        store = join_store(address, info.port, _ANSWER_S, deadline)
        has_mark = request_from_rank_0(store, store.check, ["mark"], deadline=deadline)
        if has_mark and request_from_rank_0(store, store.get, "mark", deadline=deadline) == info.mark.encode():
            return store, own
    except RankLostError:  # from look()
        raise
    except (OSError, TransportError, RuntimeError) as error:
        return None, str(error)
    return None, "another store answers at this address"


def _machine() -> str:
    """Return an identifier of this host, with its name: containers of one machine have the same boot ID."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
