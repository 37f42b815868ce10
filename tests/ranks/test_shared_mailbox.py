"""The mailbox in shared memory: what is sent arrives whole and in order, whatever its size."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.shared.mailbox import Ring, SharedMailbox, ring_bytes


@given(st.lists(st.one_of(st.none(), st.binary(max_size=700)), max_size=60))
def test_a_ring_hands_over_what_was_written_in_order(events: list[bytes | None]) -> None:
    """None: the reader looks. Messages are larger than the ring's 256 bytes, too."""
    memory = np.zeros(128 + 256, np.uint8)
    writer, reader = Ring(memory), Ring(memory)
    read = []
    for event in events:
        if event is None:
            read += reader.read()
        else:
            writer.write(event)
    while writer.unsent:
        read += reader.read()
        writer.flush()
    assert read + reader.read() == [event for event in events if event is not None]


@pytest.mark.parametrize("size", [2, 8, 64, 500])
def test_rings_take_little_memory_however_many_ranks(size: int) -> None:
    assert 1024 <= ring_bytes(size) <= 64 * 1024
    assert 2 * size * ring_bytes(size) <= max(4 * 2**20, 2 * 1024 * size)


def _message(rank: int, number: int) -> bytes:
    dice = random.Random(1000 * rank + number)
    return dice.randbytes(dice.choice((0, 10, 3_000, 200_000)))


def _exchange(transport: Transport) -> None:
    mail, rank, size, count = transport.open_mailbox(), transport.rank, transport.size, 40
    assert isinstance(mail, SharedMailbox)
    peers = list(range(1, size)) if rank == 0 else [0]
    received: dict[int, list[bytes]] = {peer: [] for peer in peers}
    for number in range(count):
        for peer in peers:
            mail.send(peer, _message(size * rank + peer, number))
        for sender, message in mail.receive():
            received[sender].append(message)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if all(len(messages) == count for messages in received.values()) and not mail._unsent:
            break
        for sender, message in mail.receive():
            received[sender].append(message)
    for peer, messages in received.items():
        assert messages == [_message(size * peer + rank, number) for number in range(count)]
    mail.send(rank, b"to itself")
    assert mail.receive() == [(rank, b"to itself")]
    if rank and size > 2:
        with pytest.raises(TransportError, match="messages go to and from rank 0"):
            mail.send(size - rank, b"")
    transport.barrier()
    mail.close()


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
def test_messages_between_rank_0_and_the_others(size: int) -> None:
    run_ranks(size, _exchange, transport="shared_memory")
