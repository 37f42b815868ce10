"""Free TCP ports of this host, for servers that rank 0's script starts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

#: Below the ports that systems give to outgoing connections (from 32768 on Linux) and Kubernetes to its services (from
#: 30000), so that nothing else takes one before the script does.
FIRST_PORT, LAST_PORT = 20000, 29999
#: For torch's store and for JAX's coordinator.
COUNT = 2
_TRIES = 200


def hold_free_ports(rank: int) -> dict[int, list[socket.socket]]:
    """Find ports that nothing uses at any address, if this is rank 0; fewer than COUNT if the host has too few.

    Each comes with sockets that hold it while they are open: no other job can hold it too, but a server with
    SO_REUSEADDR, as torch's store and gRPC's are, can listen there.
    """
    held: dict[int, list[socket.socket]] = {}
    for _ in range(_TRIES if rank == 0 else 0):
        if len(held) == COUNT:
            break
        port = FIRST_PORT + int.from_bytes(os.urandom(4), "big") % (LAST_PORT - FIRST_PORT + 1)
        sockets = _hold(port)
        if sockets is not None:
            held[port] = sockets
    return held


def _hold(port: int) -> list[socket.socket] | None:
    """Bind sockets to a port of all addresses; None if it is in use."""
    with contextlib.ExitStack() as undo:
        sockets = []
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                holder = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                holder.bind(("", port))
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    return None
                continue  # a host without IPv6
            sockets.append(holder)
        for holder in sockets:  # only now: with it before, a port could be bound that another job holds
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        undo.pop_all()
        return sockets
