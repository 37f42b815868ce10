"""The rendezvous of ranks that know only a store of their launcher: rank 0 writes the address of another one there.

An entry about a store that is gone (of ranks that torchrun has started again, say) cannot be told from a fresh one; but
nobody answers there, so it is read again until somebody does.
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
from hvdkit.transport.gloo.asking import ask_rank_0, wait_for_store
from hvdkit.transport.gloo.library import host_store, join_store
from hvdkit.transport.polling import look
from hvdkit.transport.small_collectives import broadcast_bytes
from hvdkit.world import has_hvdruns_torch_variables

Answer = TypeVar("Answer")

_PAUSE_S = 0.05
_ANSWER_S = 3.0
_HTTP_ANSWER_S = 10.0
_STORE_ANSWER_S = 120.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    """See RendezvousStore: a TCPStore of torch's, which answers whoever reaches its port.

    owner: whose process serves it, for messages. Both methods raise TransportError if that does not answer.
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


@dataclass(frozen=True)
class RendezvousInfo:
    """What rank 0 puts into the rendezvous store: where its own store is, best address first, and the mark of this job.

    secret: of the job, in hex; "" where others can read the rendezvous store. It is in rank 0's store then, which they
    can read too.
    """

    addresses: tuple[str, ...]
    port: int
    mark: str
    secret: str = ""


@dataclass(frozen=True)
class RankInfo:
    """What each rank says of itself. address: its own. reached: the address by which it reached rank 0's store."""

    host: str
    machine: str
    address: str
    reached: str


@dataclass(frozen=True)
class Rendezvous:
    """The outcome of a rendezvous.

    nodes: a number for each rank's host, equal for ranks of the same one. secret: of this job, the same on all ranks.
    """

    store: Any
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    address: str
    secret: bytes


def parse_rendezvous_info(data: bytes) -> RendezvousInfo:
    """Read what rank 0 has put into the rendezvous store. Raises TransportError for anything else."""
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
    """Read what a rank says of itself. Raises TransportError for what no rank says."""
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

    name: the key of this rendezvous. host: this host's name, for messages. interface: to be used; "" for any.
    towards: the address of this host that others most likely reach. secret: of the job, in hex, if all ranks have it
    already; it is in no store then. deadline: on the clock of time.monotonic().
    Raises TransportError naming the ranks that have not come.
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
    ask_rank_0(store, store.set, f"rank/{rank}", told, deadline=deadline)
    everyone = [parse_rank_info(one) for one in collect(store, "rank", size, deadline)]
    machines = list(dict.fromkeys(one.machine for one in everyone))
    nodes = tuple(machines.index(one.machine) for one in everyone)
    return Rendezvous(
        store,
        tuple(one.host for one in everyone),
        nodes,
        own or choose_address(everyone, nodes, rank),
        bytes.fromhex(secret or own_secret or ask_rank_0(store, store.get, "secret", deadline=deadline).decode()),
    )


def choose_address(everyone: Sequence[RankInfo], nodes: Sequence[int], rank: int) -> str:
    """The address by which a rank is reached by all others. Raises TransportError if there is none."""
    if len(set(nodes)) == 1:
        return LOOPBACK
    # Rank 0 has connected to nobody; those on other hosts know how it is reached.
    found = everyone[rank].address or next(one.reached for one, node in zip(everyone, nodes, strict=True) if node)
    if is_loopback(found):
        raise TransportError(
            f"Rank {rank} on {everyone[rank].host} has published the address {found} only, which ranks on other "
            "hosts cannot reach. Set GLOO_SOCKET_IFNAME to the interface between the hosts, for example "
            "GLOO_SOCKET_IFNAME=eth0."
        )
    return found


def collect(store: Any, what: str, size: int, deadline: float) -> list[bytes]:
    """What every rank has set under "{what}/{rank}" in rank 0's store, by rank.

    Raises TransportError naming those who have not, or rank 0 if it does not answer.
    """
    keys = [f"{what}/{rank}" for rank in range(size)]

    def ask(call: Callable[[list[str]], Any], keys: list[str]) -> Any:
        return ask_rank_0(store, call, keys, deadline=deadline)

    while not ask(store.check, keys):
        if time.monotonic() >= deadline:
            missing = [rank for rank in range(size) if not ask(store.check, [keys[rank]])]
            raise TransportError(
                f"{len(missing)} of {size} ranks have not arrived: {', '.join(map(str, missing))}. All ranks must "
                "call hvd.init(). See the output of these ranks, or of the launcher, for the cause."
            )
        look()
        time.sleep(_PAUSE_S)
    return [bytes(one) for one in ask(store.multi_get, keys)]


def _find_store(rendezvous_store: RendezvousStore, name: str, rank: int, deadline: float) -> tuple[Any, str, str, str]:
    """Rank 0's store, the address by which it was reached, this host's own towards it, and the job's secret."""
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
        look()
        time.sleep(_PAUSE_S)
    raise TransportError(f"Rank {rank} cannot reach rank 0: {seen}. See the output of rank 0 for the cause.")


def _try_store(address: str, info: RendezvousInfo, deadline: float) -> tuple[Any, str]:
    """The store and this host's own address towards it; None and what happened if it is not there."""
    try:
        with socket.create_connection((address, info.port), timeout=_ANSWER_S) as probe:
            own = str(probe.getsockname()[0])
        store = join_store(address, info.port, _ANSWER_S, deadline)
        has_mark = ask_rank_0(store, store.check, ["mark"], deadline=deadline)
        if has_mark and ask_rank_0(store, store.get, "mark", deadline=deadline) == info.mark.encode():
            return store, own
    except RankLostError:  # of what watches this wait
        raise
    except (OSError, TransportError, RuntimeError) as error:
        return None, str(error)
    return None, "another store answers at this address"


def _machine() -> str:
    """What tells this host from others: containers of one machine have the same boot, but other names."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
