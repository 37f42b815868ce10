"""Selects the address of a server on rank 0 (JAX's coordinator): reached by all ranks, a free port, and no proxy."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence

from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object, broadcast_object
from hvdkit.errors import TransportError
from hvdkit.transport.addresses import (
    LOOPBACK,
    address_of,
    address_towards,
    is_loopback,
    list_addresses,
    read_interface,
)

_ANSWER_S = 3.0
#: Variables that gRPC reads, in its order; JAX's processes connect to each other by gRPC.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def agree_on_address(rank: int, environ: Mapping[str, str]) -> str:
    """Choose "address:port" for a server on rank 0, the same on all ranks; collective.

    The address is the first address of rank 0's host to which every rank has connected; if GLOO_SOCKET_IFNAME is set,
    that of this interface. The port was free during the call, and is not reserved.
    Raises TransportError on all ranks if no such address exists.
    """
    hosts = allgather_object(engine.runtime("agree_on_address()").world.host)
    with contextlib.ExitStack() as stack:
        candidates: list[str] = []
        port = 0
        if rank == 0:
            backlog = len(hosts) * (1 + len(socket.if_nameindex()))  # connecting is the test; no connection is accepted
            listener = stack.enter_context(socket.create_server(("", 0), backlog=backlog))
            port = listener.getsockname()[1]
            candidates = _list_own(environ, next((host for host in hosts if host != hosts[0]), ""))
        candidates, port = broadcast_object((candidates, port))
        reached = allgather_object([each for each in candidates if rank == 0 or _is_reached(each, port)])
    return f"{choose_common(candidates, reached, hosts)}:{port}"


def choose_common(candidates: Sequence[str], reached: Sequence[Sequence[str]], hosts: Sequence[str]) -> str:
    """Return the first candidate that all ranks have reached.

    reached: the candidates that each rank has reached. hosts: the host of each rank. Raises TransportError naming, for
    each address, the hosts that it is not reached from.
    """
    for address in candidates:
        if all(address in each for each in reached):
            return address
    missed = {
        address: sorted({host for host, each in zip(hosts, reached, strict=True) if address not in each})
        for address in candidates
    }
    seen = "; ".join(f"{address} not from {', '.join(unreached)}" for address, unreached in missed.items())
    raise TransportError(
        f"No address of rank 0's host {hosts[0]} is reached from all hosts: {seen}. Set GLOO_SOCKET_IFNAME to the "
        "interface between the hosts if another one was tried, or open the ports between them."
    )


def find_proxy(environ: Mapping[str, str], place: str) -> str:
    """Return the variable, with its value, that makes gRPC connect to "host:port" through a proxy; "" for none."""
    name = next((name for name in _PROXIES if environ.get(name)), None)
    host = place.rpartition(":")[0].strip("[]")
    exempt = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    if name is None or any(_is_exempt(host, each.strip()) for each in exempt.split(",")):
        return ""
    return f"{name}={environ[name]}"


def _is_exempt(host: str, entry: str) -> bool:
    """Match a host as gRPC does: an entry is the end of a name, or a network such as 10.0.0.0/8."""
    with contextlib.suppress(ValueError):
        if "/" in entry and ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
            return True
    return bool(entry) and host.endswith(entry)


def _list_own(environ: Mapping[str, str], other: str) -> list[str]:
    """Return this host's addresses, the likeliest for the host `other` first; only the loopback address for ""."""
    if not other:
        return [LOOPBACK]
    interface = read_interface(environ)
    found = [address_of(interface)] if interface else list_addresses(address_towards(other))
    return [each for each in found if not is_loopback(each)]


def _is_reached(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_ANSWER_S):
        return True
    return False
