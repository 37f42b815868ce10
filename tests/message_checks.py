"""What every transport's messages and non-blocking forms must do: functions that run on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from numbers_of_ranks import DTYPES, buffer_of, expect, pattern, reduced, values_of

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.request import DoneRequest, Request

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


def requests_of_all_kinds_are_done_in_any_order(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    counts = [3 * i % 4 for i in range(size)]
    start, stop = sum(counts[:rank]), sum(counts[: rank + 1])

    def begin() -> list[tuple[Request, object]]:
        """Requests, and what each of them must hold."""
        pieces = buffer_of(10 * rank + np.arange(size), "int32")
        begun: list[tuple[Request, object]] = []
        for dtype in ("float32", "float16", "bfloat16", "int64"):
            total = reduced(size, 997, dtype)
            begun.append((transport.iallreduce(buffer_of(pattern(rank, 997, dtype), dtype)), total))
            scattered = transport.ireducescatter(buffer_of(pattern(rank, sum(counts), dtype), dtype), counts)
            begun.append((scattered, reduced(size, sum(counts), dtype)[start:stop]))
            gathered = transport.iallgather(buffer_of(pattern(rank, counts[rank], dtype), dtype), counts)
            begun.append((gathered, np.concatenate([pattern(i, counts[i], dtype) for i in range(size)])))
            root = len(begun) % size
            begun.append((transport.ibroadcast(buffer_of(pattern(rank, 13), dtype), root), pattern(root, 13)))
        begun.append((transport.iallreduce(buffer_of(np.ones(5), "float32"), "sum", 0.5), np.full(5, size / 2)))
        begun.append((transport.ialltoall(pieces, [1] * size, [1] * size), 10 * np.arange(size) + rank))
        begun.append((transport.ibarrier(), []))
        return begun

    shuffled = np.random.default_rng(rank)  # another order on each rank
    for _ in range(3):
        begun = begin()
        sent = [transport.isend(_numbers(rank, peer, 1000), peer) for peer in _peers(transport)]
        received = [(transport.ireceive(make_buffer(1000, "float32"), peer), peer) for peer in _peers(transport)]
        for place in shuffled.permutation(len(begun)):
            request, expected = begun[place]
            expect(request.wait(), expected, f"request {place}")
            assert request.done()
        for message, peer in received[::-1]:
            expect(message.wait(), _numbers(peer, rank, 1000).array)
        for message in sent:
            while not message.done():
                pass
    total = buffer_of([1], "int32")
    transport.allreduce(total)  # nothing is left of them
    expect(total, [size])


def blocking_and_non_blocking_forms_keep_one_order(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for _ in range(20):
        halves = buffer_of(pattern(rank, 501), "float16")  # which takes two collectives where MPI and Gloo are below
        request = transport.iallreduce(halves)
        for dtype in ("float16", "float32"):
            buffer = buffer_of(pattern(rank, 300), dtype)
            transport.allreduce(buffer)
            expect(buffer, reduced(size, 300))
        transport.barrier()
        gathered = transport.allgather(buffer_of([rank], "int32"), [1] * size)
        expect(gathered, range(size))
        expect(request.wait(), reduced(size, 501))


def what_is_begun_goes_on_while_a_rank_waits_for_something_else(transport: Transport) -> None:
    """Rank 0 waits for the request first, and the others for what rank 0 does after that."""
    rank, size = transport.rank, transport.size
    others = _peers(transport)
    steps: list[Callable[[], Request]] = [
        lambda: transport.iallreduce(buffer_of(np.ones(501), "float16")),  # of two collectives, as the next one
        lambda: transport.ialltoall(buffer_of([rank] * size, "int32"), [1] * size, [1] * size),
    ]
    if rank == 0:
        steps += [lambda: transport.ireceive(make_buffer(2 * LARGE, "float32"), 1)] if others else []
        steps += [lambda: transport.isend(make_buffer(2 * LARGE, "float32"), 1)] if others else []
    elif rank == 1:
        steps += [lambda: transport.isend(make_buffer(2 * LARGE, "float32"), 0)]
        steps += [lambda: transport.ireceive(make_buffer(2 * LARGE, "float32"), 0)]
    else:
        steps += [lambda: DoneRequest()] * 2

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
            request = step()
            if (rank == 0 and step in steps[:2]) or (rank == 1 and step in steps[2:]):
                request.wait()
                then()
            else:
                then()
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
    for call in (transport.allreduce, transport.iallreduce):
        with pytest.raises(ValueError, match="cannot scale int32"):
            call(buffer_of([1], "int32"), "sum", 0.5)
    halves = buffer_of(np.ones(5), "float16")
    expect(transport.iallreduce(halves).wait(), np.full(5, transport.size))
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
        requests_of_all_kinds_are_done_in_any_order,
        blocking_and_non_blocking_forms_keep_one_order,
        what_is_begun_goes_on_while_a_rank_waits_for_something_else,
        a_request_of_a_closed_group_is_an_error,
        what_is_refused_leaves_the_transport_as_it_was,
        groups_send_messages_of_their_own,
        messages_that_cannot_be_are_refused,
    )
}
