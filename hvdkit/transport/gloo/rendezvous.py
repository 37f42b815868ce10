"""The rendezvous of ranks that know only a store: rank 0 opens a store of hvdkit's own and writes its address there.

An entry about a store that is gone (of ranks that torchrun has started again, say) cannot be told from a fresh one; but
nobody answers there, so it is read again until somebody does.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvdkit.errors import TransportError
from hvdkit.transport.addresses import LOOPBACK, address_of, is_loopback, list_addresses
from hvdkit.transport.gloo.library import host_store, join_store
from hvdkit.transport.gloo.rendezvous_store import RendezvousStore
from hvdkit.transport.polling import look

_PAUSE_S = 0.05
_ANSWER_S = 3.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    store.set(f"rank/{rank}", json.dumps(asdict(RankInfo(host, _machine(), address, reached))))
    everyone = [parse_rank_info(one) for one in collect(store, "rank", size, deadline)]
    machines = list(dict.fromkeys(one.machine for one in everyone))
    nodes = tuple(machines.index(one.machine) for one in everyone)
    return Rendezvous(
        store,
        tuple(one.host for one in everyone),
        nodes,
        own or choose_address(everyone, nodes, rank),
        bytes.fromhex(secret or own_secret or store.get("secret").decode()),
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
    """What every rank has set under "{what}/{rank}", in rank order. Raises TransportError naming those who have not."""
    keys = [f"{what}/{rank}" for rank in range(size)]
    while not store.check(keys):
        if time.monotonic() >= deadline:
            missing = [rank for rank in range(size) if not store.check([keys[rank]])]
            raise TransportError(
                f"{len(missing)} of {size} ranks have not arrived: {', '.join(map(str, missing))}. All ranks must "
                "call hvd.init(). See the output of these ranks, or of the launcher, for the cause."
            )
        look()
        time.sleep(_PAUSE_S)
    return [bytes(one) for one in store.multi_get(keys)]


def _find_store(rendezvous_store: RendezvousStore, name: str, rank: int, deadline: float) -> tuple[Any, str, str, str]:
    """Rank 0's store, the address by which it was reached, this host's own towards it, and the job's secret."""
    seen = "rank 0 has not published the address of its store"
    while time.monotonic() < deadline:
        found = rendezvous_store.get(name)
        if found is not None:
            info = parse_rendezvous_info(found)
            for address in info.addresses:
                store, own = _try_store(address, info)
                if store is not None:
                    return store, address, own, info.secret
                seen = f"its store at {address}:{info.port} cannot be reached ({own})"
        look()
        time.sleep(_PAUSE_S)
    raise TransportError(f"Rank {rank} cannot reach rank 0: {seen}. See the output of rank 0 for the cause.")


def _try_store(address: str, info: RendezvousInfo) -> tuple[Any, str]:
    """The store and this host's own address towards it; None and what happened if it is not there."""
    try:
        with socket.create_connection((address, info.port), timeout=_ANSWER_S) as probe:
            own = str(probe.getsockname()[0])
        store = join_store(address, info.port, _ANSWER_S)
        if store.check(["mark"]) and store.get("mark") == info.mark.encode():
            return store, own
    except (OSError, TransportError, RuntimeError) as error:
        return None, str(error)
    return None, "another store answers at this address"


def _machine() -> str:
    """What tells this host from others: containers of one machine have the same boot, but other names."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
