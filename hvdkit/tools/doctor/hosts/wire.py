"""TCP between agents: who answers at an address, and how fast."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CONNECT_S = 2.5
_FLOOD_S = 0.25
_CHUNK = bytes(1 << 18)
_FLOOD = b"flood\n"
_GREETING_BYTES = 256


class Listener:
    """Greets whoever connects, at a port of its own on all addresses, and sends data to those that ask."""

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting.encode() + b"\n"
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.sendall(self._greeting)
            if connection.recv(len(_FLOOD)) == _FLOOD:
                end = time.monotonic() + 2 * _FLOOD_S
                while time.monotonic() < end:
                    connection.sendall(_CHUNK)


def greet(address: str, port: int, greeting: str) -> str:
    """Connect and read who answers; "" if it is the right one, else the problem as Reach has it."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            return "" if _read_line(connection) == greeting else "other"
    except OSError as error:
        return describe(error)


def measure(address: str, port: int, greeting: str) -> float:
    """Receive for a moment; returns Mbit/s, 0 if nothing came."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
        if _read_line(connection) != greeting:
            return 0.0
        connection.sendall(_FLOOD)
        return _receive(connection)
    return 0.0


def describe(error: OSError) -> str:
    """Turn an error of connecting into a word, or what the system says."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return error.strerror or str(error)


def _receive(connection: socket.socket) -> float:
    room = bytearray(1 << 20)
    connection.recv_into(room)  # what is quick at first: full buffers, the first burst
    begin, received = time.monotonic(), 0
    while (passed := time.monotonic() - begin) < _FLOOD_S:
        count = connection.recv_into(room)
        if not count:
            break
        received += count
    return received * 8e-6 / passed if passed > 0 else 0.0


def _read_line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < _GREETING_BYTES:
        more = connection.recv(1)
        if not more:
            break
        data += more
    return data.decode(errors="replace").rstrip("\n")
