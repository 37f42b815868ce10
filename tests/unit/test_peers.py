"""The connections between all ranks: messages whole and in order, whoever is slow, and news of dead ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hvdkit.errors import RankLostError, TransportError
from hvdkit.transport.gloo import peers as peers_module
from hvdkit.transport.gloo.connect import connect_all, listen
from hvdkit.transport.gloo.peers import PeerConnections, PeerMailbox

ONE, OTHER = b"one".ljust(16), b"other".ljust(16)
WAIT_S = 10.0


def connect_ranks(size: int) -> list[PeerConnections]:
    """The connections of each of `size` ranks, all in this process."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low, high in itertools.combinations(range(size), 2):
        connections[low][high], connections[high][low] = socket.socketpair()
    return [PeerConnections(rank, connections[rank], [f"node{rank}"] * size) for rank in range(size)]


@pytest.fixture
def connected() -> Iterator[list[PeerConnections]]:
    ranks = connect_ranks(3)
    yield ranks
    for rank in ranks:
        rank.forget()


def test_messages_of_all_sizes_arrive_whole_and_in_order(connected: list[PeerConnections]) -> None:
    sent = [bytes([at % 251]) * length for at, length in enumerate((0, 1, 15, 70_000, 3, 5_000_000, 2, 0))]
    for message in sent:
        connected[0].send(1, ONE, message)  # far more than the system takes before anybody reads
    received: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while len(received) < len(sent) and time.monotonic() < deadline:
        connected[0].receive(ONE)
        received += [message for peer, message in connected[1].receive(ONE) if peer == 0]
    assert received == sent


def test_a_message_waits_for_its_mailbox(connected: list[PeerConnections]) -> None:
    connected[0].send(2, OTHER, b"for the other")
    connected[1].send(2, ONE, b"for the one")
    connected[2].send(2, ONE, b"for itself")
    assert sorted(connected[2].receive(ONE)) == [(1, b"for the one"), (2, b"for itself")]
    assert connected[2].receive(OTHER) == [(0, b"for the other")]
    assert connected[2].receive(OTHER) == []


def test_a_mailbox_numbers_ranks_as_its_group_does(connected: list[PeerConnections]) -> None:
    ranks = [2, 0]
    first, second = PeerMailbox(connected[2], ranks, ONE), PeerMailbox(connected[0], ranks, ONE)
    first.send(1, b"hello")
    assert second.receive() == [(0, b"hello")]
    second.close()
    first.send(1, b"too late")
    connected[0].receive(OTHER)
    assert second.receive() == []


def close_like_a_dead_process(peers: PeerConnections) -> None:
    peers.forget()


def lost(peers: PeerConnections) -> str:
    """What check() says, within a few seconds; "" for nothing."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            peers.check(range(3))
        except RankLostError as error:
            return str(error)
        time.sleep(0.01)
    return ""


def test_a_dead_rank_is_named(connected: list[PeerConnections]) -> None:
    connected[0].check(range(3))
    close_like_a_dead_process(connected[1])
    assert "Rank 1 on host node0 has died" in lost(connected[0])
    connected[0].check([0, 2])  # a group that it is not in goes on


def test_what_a_rank_sent_before_it_died_is_received(connected: list[PeerConnections]) -> None:
    connected[1].send(0, ONE, b"last words")
    close_like_a_dead_process(connected[1])
    assert connected[0].receive(ONE) == [(1, b"last words")]
    assert "Rank 1" in lost(connected[0])


def test_the_first_death_is_named_and_not_one_that_followed_from_it(
    connected: list[PeerConnections],
) -> None:
    close_like_a_dead_process(connected[2])
    with pytest.raises(RankLostError, match="Rank 2"):
        connected[1].check(range(3), at_once=True)
    close_like_a_dead_process(connected[1])
    assert "Rank 2 on host node0 has died" in lost(connected[0])


def test_a_rank_that_leaves_is_told_from_a_dead_one(
    connected: list[PeerConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_LEAVING_GRACE_S", 0.1)
    connected[1].leave()
    close_like_a_dead_process(connected[1])
    connected[0].check(range(3))  # what it did before may still be on its way
    assert "Rank 1 on host node0 has shut hvdkit down" in lost(connected[0])


def test_a_child_of_a_dead_rank_does_not_keep_it_alive(connected: list[PeerConnections]) -> None:
    held, release = os.pipe()
    child = os.fork()
    if not child:
        os.close(release)
        os.read(held, 1)  # a worker that outlives its parent
        os._exit(0)
    try:
        close_like_a_dead_process(connected[1])
        assert "Rank 1" in lost(connected[0])
    finally:
        os.write(release, b"x")
        os.waitpid(child, 0)


def connect(size: int, secrets: list[bytes], deadline_s: float) -> list[object]:
    """What connect_all returns or raises on each of `size` ranks, which are threads here."""
    listeners = [listen("127.0.0.1", size) for _ in range(size)]
    places = [("127.0.0.1", one.getsockname()[1]) for one in listeners]
    answers: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            deadline = time.monotonic() + deadline_s
            answers[rank] = connect_all(listeners[rank], rank, places, secrets[rank], deadline)
        except TransportError as error:
            answers[rank] = error

    stranger = socket.create_connection(places[0])
    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for one in (stranger, *listeners):
        one.close()
    return answers


def test_all_ranks_are_connected_and_a_stranger_is_not() -> None:
    answers = connect(4, [b"secret"] * 4, WAIT_S)
    for rank, connections in enumerate(answers):
        assert isinstance(connections, dict), connections
        assert set(connections) == set(range(4)) - {rank}
    for low, high in itertools.combinations(range(4), 2):
        ends = answers[low][high], answers[high][low]  # type: ignore[index]
        assert ends[0].getsockname() == ends[1].getpeername()
        for end in ends:
            end.close()


def test_strangers_who_say_nothing_keep_no_rank_out() -> None:
    listeners = [listen("127.0.0.1", 300) for _ in range(2)]
    places = [("127.0.0.1", one.getsockname()[1]) for one in listeners]
    answers: list[dict[int, socket.socket]] = []
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(places[0]))
        deadline = time.monotonic() + WAIT_S
        other = threading.Thread(
            target=lambda: answers.append(connect_all(listeners[1], 1, places, b"secret", deadline))
        )
        other.start()
        answers.append(connect_all(listeners[0], 0, places, b"secret", deadline))
        other.join(WAIT_S)
    assert [set(one) for one in answers] in ([{1}, {0}], [{0}, {1}])
    for one in (*listeners, *answers[0].values(), *answers[1].values()):
        one.close()


def test_a_rank_that_does_not_know_the_secret_is_kept_out() -> None:
    first, second = connect(2, [b"secret", b"guess"], 1.0)
    assert "connections from rank(s) 1" in str(first)
    assert "Rank 1 cannot connect to rank 0 at 127.0.0.1:" in str(second)
