"""Agents that come to hvdrun all at once are all let in; one that has lost it finds out whether it is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdkit.launch.agent import wire
from hvdkit.launch.agent.wire import connect_to_hvdrun, probe_hvdrun
from hvdkit.launch.state.accept_loop import AcceptLoop
from hvdkit.launch.state.authenticated_server import HANDSHAKES, AuthenticatedServer, raise_file_limit
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.ranks import Ranks

_COMING = 300
_WAITING = Path("/proc/sys/net/core/somaxconn")


async def _open(ranks: int) -> ControlServer:
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    control = ControlServer(Ranks(ranks), nothing)
    await control.open(("127.0.0.1",), folder="")
    return control


async def _come_before_anyone_is_let_in() -> None:
    control = await _open(_COMING)
    port = int(control.variables["HVDKIT_CONTROL"].split(":")[1])
    with contextlib.ExitStack() as stack:
        for _ in range(_COMING):  # nothing is awaited, so all wait in the system's queue
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
    await control.close()


@pytest.mark.skipif(_WAITING.exists() and int(_WAITING.read_text()) < _COMING, reason="the system's queue is short")
def test_hundreds_of_agents_find_room_to_wait() -> None:
    asyncio.run(_come_before_anyone_is_let_in())  # a TimeoutError is of one that found none


#: hvdrun's side in a process of its own, which may have so many files open; 0: as many as the system lets it.
_SERVER = """
import asyncio, json, resource, sys
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.ranks import Ranks

async def main(files):
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    control = ControlServer(Ranks(2), print)
    await control.open(("127.0.0.1",), folder="")
    print(json.dumps(control.variables), flush=True)
    most = 0
    while not control.connected:
        most = max(most, len(control._server.accept_loop._unproven))
        await asyncio.sleep(0.01)
    print(most, flush=True)
    await control.close()

asyncio.run(main(int(sys.argv[1])))
"""


@contextlib.contextmanager
def strangers(port: int, count: int) -> Iterator[None]:
    """So many connections over which nothing comes, each opened anew when it is dropped."""
    poll, connections = select.poll(), dict[int, socket.socket]()
    ended = threading.Event()

    def open_one() -> None:
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect(("127.0.0.1", port))
        connections[connection.fileno()] = connection
        poll.register(connection, select.POLLRDHUP)

    def hold() -> None:
        while not ended.is_set():
            for number, _ in poll.poll(100):
                poll.unregister(number)
                connections.pop(number).close()
                open_one()

    for _ in range(count):
        open_one()
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        yield
    finally:
        ended.set()
        holder.join()
        for connection in connections.values():
            connection.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("files", "count"),
    [
        (0, _COMING),
        (60, _COMING),
        pytest.param(0, 3000, marks=pytest.mark.slow),
        pytest.param(256, 3000, marks=pytest.mark.slow),
    ],
)
def test_strangers_who_say_nothing_keep_no_agent_out(files: int, count: int) -> None:
    """They have connected before the agent does, and come again."""
    restore = raise_file_limit(count)
    hvdrun = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(files)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert hvdrun.stdout is not None and hvdrun.stderr is not None
    try:
        variables = json.loads(hvdrun.stdout.readline())
        port = int(variables["HVDKIT_CONTROL"].split(":")[1])
        with strangers(port, count):
            agent = connect_to_hvdrun(variables["HVDKIT_CONTROL"], variables["HVDKIT_CONTROL_SECRET"], 1)
            agent.send(wire.HELLO, json.dumps({"rank": 1, "size": 2, "host": "n1"}).encode())
            assert 1 < int(hvdrun.stdout.readline()) <= (files // 4 or HANDSHAKES)
        assert (hvdrun.wait(20), hvdrun.stderr.read()) == (0, "")
    finally:
        hvdrun.kill()
        hvdrun.wait()
        restore()


async def _close_while_strangers_are_dropped() -> None:
    async def serve(*_: object) -> None:
        await asyncio.sleep(60)

    for number in range(20):
        loop = AcceptLoop(serve, 2, 64)
        listener = socket.create_server(("127.0.0.1", 0))
        loop.listen([listener])
        loop.start()
        loop._grace_s = 0.001
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            await asyncio.sleep(0.01 + number / 5000)
            time.sleep(0.003)  # so that a time limit of the loop ends as it is cancelled
            await asyncio.wait_for(loop.close(), 20)


def test_a_server_closes_while_it_drops_strangers() -> None:
    asyncio.run(_close_while_strangers_are_dropped())


def test_hvdrun_listens_only_where_the_other_hosts_reach_it() -> None:
    async def listened() -> list[str]:
        control = await _open(1)
        assert control._server is not None
        found = [one.getsockname()[0] for one in control._server.accept_loop.sockets]
        await control.close()
        return found

    assert asyncio.run(listened()) == ["127.0.0.1"]
    server = AuthenticatedServer(b"", b"", lambda _: asyncio.sleep(0))
    port = server.listen_tcp(["127.0.0.1", "127.0.0.3"])
    assert {one.getsockname() for one in server.accept_loop.sockets} == {("127.0.0.1", port), ("127.0.0.3", port)}
    asyncio.run(server.close())


def test_an_address_that_is_another_machines_is_listened_for_everywhere() -> None:
    """As before a router that forwards the port."""
    server = AuthenticatedServer(b"", b"", lambda _: asyncio.sleep(0))
    port = server.listen_tcp(["203.0.113.7", "127.0.0.1"])
    socket.create_connection(("127.0.0.1", port)).close()
    asyncio.run(server.close())


def test_what_hvdrun_starts_does_not_inherit_its_limit_of_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 30
    restore = raise_file_limit(10)
    try:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(most, max(1 << 16, before[0]))
        command = [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"]
        seen = subprocess.run(command, preexec_fn=restore, capture_output=True, text=True, timeout=20)
        assert seen.stdout.strip() == str(before)
    finally:
        restore()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _look(addresses: str = "127.0.0.1", secret: str = "") -> tuple[bool | None, bool | None]:
    """What an agent finds while hvdrun is there, and when it has ended."""
    control = await _open(1)
    port = control.variables["HVDKIT_CONTROL"].split(":")[1]
    given = f"tcp:{port}:{addresses}", secret or control.variables["HVDKIT_CONTROL_SECRET"]
    there = await asyncio.to_thread(probe_hvdrun, *given)
    await control.close()
    return there, await asyncio.to_thread(probe_hvdrun, *given)


def test_an_agent_finds_out_whether_hvdrun_is_there() -> None:
    assert asyncio.run(_look()) == (True, False)
    assert asyncio.run(_look("127.0.0.2,127.0.0.1")) == (True, False)


def test_what_does_not_know_the_secret_is_not_hvdrun() -> None:
    assert asyncio.run(_look(secret="another"))[0] is not True


def test_where_nothing_answers_nothing_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert probe_hvdrun(f"tcp:{mute.getsockname()[1]}:127.0.0.1", "secret") is None
