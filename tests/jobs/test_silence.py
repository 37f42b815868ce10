"""The launcher's connections outlast silence, those of what it has started too."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from hvdkit.launch.agent.partition_tolerance import disable_session_timeouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

_CONNECTED = """
import os, socket, sys
if os.fork():
    os.wait()
    os._exit(0)
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
print("connected", flush=True)
input()
asked = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
print(*(connection.getsockopt(*each) for each in asked), flush=True)
"""


def test_no_connection_of_a_session_fails_by_silence() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", _CONNECTED, str(server.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        assert disable_session_timeouts(process.pid) == ""
        process.stdin.write("\n")
        process.stdin.flush()
        keep_alive, patience_ms = map(int, process.stdout.readline().split())
    assert keep_alive == 0 and patience_ms > 24 * 3600 * 1000


def test_a_session_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    assert disable_session_timeouts(process.pid) == ""
