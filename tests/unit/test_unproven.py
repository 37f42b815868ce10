"""One host that opens many connections drops its own, not those of other hosts, for the next one."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from hvdkit.handshake import Session, connect
from hvdkit.launch.state import authenticated_server
from hvdkit.launch.state.authenticated_server import AuthenticatedServer, ServerThread
from hvdkit.transport.handshakes import Handshakes
from hvdkit.unproven import Unproven

SECRET, PURPOSE = b"s" * 32, b"test"
PLACES, MANY = 6, 40


def test_the_oldest_of_the_peer_with_the_most_connections_is_dropped() -> None:
    unproven: Unproven[int] = Unproven(5)
    for number, peer in enumerate("baacc"):
        assert not unproven.full
        unproven.add(number, (peer, 1000 + number), float(number))
    assert unproven.full and list(unproven) == [0, 1, 2, 3, 4]
    assert unproven.choose() == [1]  # a and c have two; the oldest of these
    assert unproven.choose(3) == [1, 3, 0]  # then all have one
    assert unproven.choose(9) == [1, 3, 0, 2, 4]
    assert unproven.remove(1) and not unproven.remove(1)
    assert not unproven.full and unproven.choose() == [3]
    assert unproven.since(3) == 3.0


def test_connections_without_an_address_are_of_one_peer() -> None:
    """As those of a Unix socket."""
    unproven: Unproven[int] = Unproven(2)
    for number, address in enumerate(("", b"", "")):
        unproven.add(number, address, float(number))
    assert unproven.choose(2) == [0, 1]


def test_choosing_several_is_choosing_one_after_another() -> None:
    dice = random.Random(3)
    for _ in range(200):
        unproven: Unproven[int] = Unproven(50)
        for number in range(dice.randint(1, 30)):
            unproven.add(number, (f"10.0.0.{dice.randint(1, 5)}", 1), float(number))
            if dice.random() < 0.3:
                unproven.remove(dice.randrange(number + 1))
        chosen, wanted = unproven.choose(dice.randint(1, 30)), list[int]()
        for _ in chosen:
            wanted += unproven.choose()
            unproven.remove(wanted[-1])
        assert chosen == wanted


def test_a_peer_with_fewer_connections_than_others_loses_none() -> None:
    unproven: Unproven[int] = Unproven(PLACES)
    unproven.add(0, ("10.0.0.1", 1), 0.0)
    for number in range(1, 1000):
        if unproven.full:
            unproven.remove(unproven.choose()[0])
        unproven.add(number, (f"10.0.0.{2 + number % 2}", 1), float(number))
    assert 0 in set(unproven) and len(unproven) == PLACES


@contextmanager
def asyncio_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """As hvdrun has one for its agents."""
    monkeypatch.setattr(authenticated_server, "HANDSHAKES", PLACES)
    server = AuthenticatedServer(SECRET, PURPOSE, lambda _: asyncio.sleep(0))
    port = server.listen_tcp(["127.0.0.1"])
    thread = ServerThread(server, "test")
    try:
        yield port
    finally:
        thread.close(0)


@contextmanager
def thread_server(_: pytest.MonkeyPatch) -> Iterator[int]:
    """As ranks under Gloo, and tf.data service, have one."""
    with socket.create_server(("127.0.0.1", 0), backlog=2 * MANY) as listener:
        handshakes, ended = Handshakes(listener, SECRET, PURPOSE, most=PLACES), threading.Event()

        def serve() -> None:
            while not ended.is_set():
                for _, connection in handshakes.go_on(0.05):
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join()
            handshakes.close()


@pytest.mark.parametrize("server", [asyncio_server, thread_server])
def test_silent_connections_of_one_address_do_not_displace_those_of_another(
    server: Callable[[pytest.MonkeyPatch], AbstractContextManager[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(monkeypatch) as port, ExitStack() as stack:

        def open_from(address: str) -> socket.socket:
            place, source = ("127.0.0.1", port), (address, 0)
            return stack.enter_context(socket.create_connection(place, timeout=60, source_address=source))

        slow = [open_from("127.0.0.2") for _ in range(2)]
        many = [open_from("127.0.0.1") for _ in range(MANY)]
        for one in many[:-PLACES]:  # dropped, so that the later ones are accepted
            assert len(one.recv(64, socket.MSG_WAITALL)) == 32
        for one in slow:
            assert isinstance(connect(one, SECRET, PURPOSE), Session)
