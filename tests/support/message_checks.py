"""What every transport's messages must do: functions that run on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from numbers_of_ranks import DTYPES, buffer_of, expect, pattern, reduced, values_of

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.request import Request

LARGE = 1_500_007  # float32: more than a socket, a ring or MPI's eager messages hold


def _peers(transport: Transport) -> list[int]:
    return [peer for peer in range(transport.size) if peer != transport.rank]


def _numbers(source: int, target: int, count: int, dtype: str = "float32") -> Buffer:
    return buffer_of(pattern(7 * source + target, count, dtype), dtype)


def messages_of_any_size_and_dtype_in_both_directions_at_once(transport: Transport) -> None:
    for count, dtypes in ((0, ["float32"]), (1, DTYPES), (4097, DTYPES), (LARGE, ["float32"])):
        for dtype in dtypes:
            received = {peer: make_buffer(count, dtype) for peer in _peers(transport)}
            requests = [transport.isend(_numbers(transport.rank, peer, count, dtype), peer) for peer in received]
            for peer, buffer in received.items():
                transport.receive(buffer, peer)
                expect(buffer, values_of(_numbers(peer, transport.rank, count, dtype)), f"{dtype} {count} from {peer}")
            for request in requests:
                request.wait()


def blocking_messages_go_round_a_ring(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    if size == 1:
        return
    for count in (1, LARGE):
        buffer = buffer_of(np.zeros(count), "float32")
        if rank:
            transport.receive(buffer, rank - 1, 5)
        buffer.array[:] += rank
        transport.send(buffer, (rank + 1) % size, 5)
        if not rank:
            transport.receive(buffer, size - 1, 5)
            expect(buffer, np.full(count, sum(range(size))))


def messages_arrive_by_tag_in_the_order_of_sending(transport: Transport) -> None:
    turns, tags = range(4), (3, 0, 32767)
    sent = [
        transport.isend(buffer_of([transport.rank, tag, turn], "int64"), peer, tag)
        for turn in turns
        for tag in tags
        for peer in _peers(transport)
    ]
    for peer in _peers(transport):
        for tag in sorted(tags):  # another order than that of sending
            received = [(make_buffer(3, "int64"), turn) for turn in turns]
            requests = [transport.ireceive(buffer, peer, tag) for buffer, _ in received]
            for request in reversed(requests):
                request.wait()
            for buffer, turn in received:
                expect(buffer, [peer, tag, turn])
    for request in reversed(sent):
        request.wait()


def messages_are_done_in_any_order_beside_collectives(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    shuffled = np.random.default_rng(rank)  # another order on each rank
    for _ in range(3):
        sent = [(transport.isend(_numbers(rank, peer, 1000), peer), peer) for peer in _peers(transport)]
        received = [(transport.ireceive(make_buffer(1000, "float32"), peer), peer) for peer in _peers(transport)]
        halves = buffer_of(pattern(rank, 501), "float16")  # which takes two collectives where MPI and Gloo are below
        transport.allreduce(halves)
        expect(halves, reduced(size, 501))
        for place in shuffled.permutation(len(received)):
            message, peer = received[place]
            expect(message.wait(), _numbers(peer, rank, 1000).array)
            assert message.done()
        for message, _ in sent:
            while not message.done():
                pass
    total = buffer_of([1], "int32")
    transport.allreduce(total)  # nothing is left of them
    expect(total, [size])


def what_is_begun_goes_on_while_a_rank_waits_for_something_else(transport: Transport) -> None:
    """Rank 1 waits for the message first, and rank 0 for what rank 1 does after that."""
    rank, size = transport.rank, transport.size
    others = _peers(transport)
    steps: list[Callable[[], Request] | None] = [None, None]
    if rank == 0 and others:
        steps = [
            lambda: transport.ireceive(make_buffer(2 * LARGE, "float32"), 1),
            lambda: transport.isend(make_buffer(2 * LARGE, "float32"), 1),
        ]
    elif rank == 1:
        steps = [
            lambda: transport.isend(make_buffer(2 * LARGE, "float32"), 0),
            lambda: transport.ireceive(make_buffer(2 * LARGE, "float32"), 0),
        ]

    def collective() -> None:
        total = buffer_of([1], "int32")
        transport.allreduce(total)
        expect(total, [size])

    def message() -> None:
        number = buffer_of([7], "int32")
        for peer in others if rank == 0 else ():
            transport.send(number, peer, 3)
        if rank:
            transport.receive(number, 0, 3)

    for step in steps:
        for then in (collective, message, transport.barrier):
            transport.barrier()
            if rank == 0:
                time.sleep(0.02)  # the others are in their waits by then
            request = None if step is None else step()
            if rank == 1 and request is not None:
                request.wait()
            then()
            if rank == 0 and request is not None:
                request.wait()


def a_request_of_a_closed_group_is_an_error(transport: Transport) -> None:
    if transport.size == 1:
        return
    group = transport.split([range(transport.size)])
    assert group is not None
    group.barrier()
    request = group.ireceive(make_buffer(1, "float32"), (group.rank + 1) % group.size)
    group.close()
    with pytest.raises(TransportError, match="closed before"):
        request.wait()


def what_is_refused_leaves_the_transport_as_it_was(transport: Transport) -> None:
    with pytest.raises(ValueError, match="cannot scale int32"):
        transport.allreduce(buffer_of([1], "int32"), "sum", 0.5)
    halves = buffer_of(np.ones(5), "float16")
    transport.allreduce(halves)
    expect(halves, np.full(5, transport.size))
    if transport.size > 1:
        request = transport.isend(buffer_of([1, 2, 3], "uint8"), (transport.rank + 1) % transport.size)
        with pytest.raises(TransportError, match=r"of 3 bytes, but 8 bytes"):
            transport.receive(make_buffer(2, "float32"), (transport.rank - 1) % transport.size)
        request.wait()


def groups_send_messages_of_their_own(transport: Transport) -> None:
    ranks = list(range(transport.size))[::-1]
    first, second = transport.split([ranks]), transport.split([ranks])
    assert first is not None and second is not None
    groups = {"all": transport, "first": first, "second": second}
    requests = [
        group.isend(buffer_of([group.rank, number], "int32"), peer)
        for number, group in enumerate(groups.values())
        for peer in _peers(group)
    ]
    for number, group in reversed(list(enumerate(groups.values()))):
        for peer in _peers(group):
            buffer = make_buffer(2, "int32")
            group.receive(buffer, peer)
            expect(buffer, [peer, number])
    for request in requests:
        request.wait()
    transport.barrier()
    first.close()
    second.close()


def messages_that_cannot_be_are_refused(transport: Transport) -> None:
    buffer, size = make_buffer(4, "float32"), transport.size
    other = (transport.rank + 1) % size
    for peer, tag in ((transport.rank, 0), (size, 0), (-1, 0), *([(other, -1), (other, 32768)] if size > 1 else [])):
        for call in (transport.send, transport.receive, transport.isend, transport.ireceive):
            with pytest.raises(ValueError, match=r"peer is|tag is"):
                call(buffer, peer, tag)
    if size == 1:
        return
    for count in (3, 5):  # too short, too long
        request = transport.isend(make_buffer(count, "float32"), other, 9)
        with pytest.raises(TransportError, match=r"message|TRUNCATE"):
            transport.receive(buffer, (transport.rank - 1) % size, 9)
        request.wait()
        transport.barrier()


MESSAGE_CHECKS: dict[str, Callable[[Transport], None]] = {
    check.__name__: check
    for check in (
        messages_of_any_size_and_dtype_in_both_directions_at_once,
        blocking_messages_go_round_a_ring,
        messages_arrive_by_tag_in_the_order_of_sending,
        messages_are_done_in_any_order_beside_collectives,
        what_is_begun_goes_on_while_a_rank_waits_for_something_else,
        a_request_of_a_closed_group_is_an_error,
        what_is_refused_leaves_the_transport_as_it_was,
        groups_send_messages_of_their_own,
        messages_that_cannot_be_are_refused,
    )
}
