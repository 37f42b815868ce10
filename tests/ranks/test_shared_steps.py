"""The steps of ranks that share memory: collectives of every kind take turns in it, whichever rank is late."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from numbers_of_ranks import buffer_of, expect, pattern, reduced
from ranks import run_ranks

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import ALL_GATHER, ALLREDUCE, REDUCE_SCATTER, Buckets, BucketSpec
from hvdkit.transport.buffer import Buffer, Op
from hvdkit.transport.shared.buckets import SharedBuckets

MIB = 2**20
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "uint8", "bool")
#: Bytes of a buffer: one number, a slot and a little more, a chunk and a little more or less, several chunks.
SIZES = (8, 4096, 32 * 1024, 32 * 1024 + 8, 64 * 1024, 64 * 1024 + 8, 300_000, MIB - 8, MIB, MIB + 64, 3 * MIB + 1000)
KINDS = ("allreduce", "allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "gather", "bucket")
BUCKETS = (1000, 70_001, 3)


def _reduce(rows: np.ndarray, op: Op) -> np.ndarray:
    """The reduction of every rank's numbers, one row for each rank."""
    if op == "sum" and rows.dtype != np.bool_:
        return np.asarray(rows.sum(axis=0))
    return np.asarray(rows.min(axis=0) if op == "min" else rows.max(axis=0))


class Mixture:
    """Random collectives, the same on all ranks by the seed, with pauses that each rank draws for itself."""

    def __init__(self, transport: Transport, seed: int) -> None:
        self._transport, self._rank, self._size = transport, transport.rank, transport.size
        self._plan, self._own = random.Random(seed), random.Random(seed * 100 + transport.rank)
        self._buckets: Buckets = transport.open_buckets([BucketSpec("float32", count) for count in BUCKETS], 2)
        self._begun: dict[int, int] = {}
        self._number = 0

    def do_one(self) -> None:
        """Do the next collective, and compare its result."""
        self._number += 1
        kind, dtype = self._plan.choice(KINDS), self._plan.choice(DTYPES)
        count = max(1, self._plan.choice(SIZES) // buffer_of([0], dtype).itemsize)
        if self._own.random() < 0.2:
            time.sleep(self._own.choice((0.0001, 0.002)))
        getattr(self, f"_{kind}")(dtype, count, f"{self._number}: {kind} of {count} {dtype}")

    def _made(self, rank: int, count: int, dtype: str) -> np.ndarray:
        """What a rank gives to this collective: another number in each, so that the last one's is not taken for it."""
        values = pattern(rank + self._number % 4, count, dtype)
        return np.asarray(values if dtype == "bool" else values + self._number % 3)

    def _allreduce(self, dtype: str, count: int, about: str) -> None:
        op: Op = self._plan.choice(("sum", "min", "max"))
        buffer = buffer_of(self._made(self._rank, count, dtype), dtype)
        self._transport.allreduce(buffer, op)
        rows = np.stack([self._made(rank, count, dtype) for rank in range(self._size)])
        expect(buffer, _reduce(rows, op), about)

    def _broadcast(self, dtype: str, count: int, about: str) -> None:
        root = self._plan.randrange(self._size)
        buffer = buffer_of(self._made(self._rank, count, dtype), dtype)
        self._transport.broadcast(buffer, root)
        expect(buffer, self._made(root, count, dtype), about)

    def _counts(self, count: int) -> list[int]:
        return [count // self._size + self._plan.choice((0, 0, 5)) for _ in range(self._size)]

    def _allgather(self, dtype: str, count: int, about: str) -> None:
        counts = self._counts(count)
        gathered = self._transport.allgather(
            buffer_of(self._made(self._rank, counts[self._rank], dtype), dtype), counts
        )
        expect(gathered, np.concatenate([self._made(rank, one, dtype) for rank, one in enumerate(counts)]), about)

    def _reducescatter(self, dtype: str, count: int, about: str) -> None:
        counts = self._counts(count)
        given = buffer_of(self._made(self._rank, sum(counts), dtype), dtype)
        rows = np.stack([self._made(rank, sum(counts), dtype) for rank in range(self._size)])
        first = sum(counts[: self._rank])
        total = _reduce(rows, "sum")[first : first + counts[self._rank]]
        expect(self._transport.reducescatter(given, counts), total, about)

    def _alltoall(self, dtype: str, count: int, about: str) -> None:
        table = [self._counts(count) for _ in range(self._size)]  # sender, receiver
        sent = [
            buffer_of(self._made(self._rank + 2 * to, one, dtype), dtype) for to, one in enumerate(table[self._rank])
        ]
        received = [buffer_of(np.zeros(table[rank][self._rank]), dtype) for rank in range(self._size)]
        self._transport.alltoall_into(received, sent)
        for rank, buffer in enumerate(received):
            expect(buffer, self._made(rank + 2 * self._rank, buffer.count, dtype), f"{about} from {rank}")

    def _gather(self, dtype: str, count: int, about: str) -> None:
        root = self._plan.randrange(self._size)
        pieces = [buffer_of(np.zeros(count), dtype) for _ in range(self._size)] if self._rank == root else []
        self._transport.gather_into(pieces, buffer_of(self._made(self._rank, count, dtype), dtype), root)
        for rank, piece in enumerate(pieces):
            expect(piece, self._made(rank, count, dtype), f"{about} from {rank}")

    def _bucket(self, dtype: str, count: int, about: str) -> None:
        """Begin a round of the next bucket; end that of the bucket before the last one, which has the same memory."""
        del dtype, count
        index = self._plan.randrange(len(BUCKETS))
        for other in [other for other in self._begun if other % 2 == index % 2]:
            self._end(other, about)
        phases = self._plan.choice((ALLREDUCE, ALLREDUCE, REDUCE_SCATTER, ALL_GATHER))
        memory = self._buckets.memory[index]
        memory.array[:] = pattern(self._rank, memory.count) + self._number
        self._begun[index] = self._number
        self._buckets.begin(index, (), phases)
        if phases != ALLREDUCE:
            self._buckets.wait(index)
            del self._begun[index]
            if phases == REDUCE_SCATTER:
                start, stop = self._buckets.shard[index]
                whole = reduced(self._size, memory.count) + self._size * self._number
                expect(memory.slice(start, stop), whole[start:stop], about)

    def _end(self, index: int, about: str) -> None:
        self._buckets.wait(index)
        memory = self._buckets.memory[index]
        expect(
            memory, reduced(self._size, memory.count) + self._size * self._begun.pop(index), f"{about}, bucket {index}"
        )

    def end(self) -> None:
        """End what has begun."""
        for index in list(self._begun):
            self._end(index, "at the end")
        self._transport.barrier()
        self._buckets.close()


def mix(transport: Transport, seed: int, count: int, seconds: float = 0.0) -> int:
    """Do `count` random collectives, and more until so many seconds are over."""
    mixture, done = Mixture(transport, seed), 0
    deadline = time.monotonic() + seconds
    going = Buffer(np.ones(1, np.int32), "int32")
    while done < count or going.array[0]:
        for _ in range(20):
            mixture.do_one()
        done += 20
        going.array[0] = time.monotonic() < deadline
        transport.broadcast(going, 0)
    mixture.end()
    return done


@pytest.mark.ranks
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_collectives_of_every_kind_take_turns_in_the_same_memory(size: int) -> None:
    run_ranks(size, mix, 7, 100, transport="shared_memory_only")


def begin_again(transport: Transport) -> str:
    """Begin a bucket that an exception has interrupted between its two steps."""
    buckets = transport.open_buckets([BucketSpec("float32", 8)], 1)
    assert isinstance(buckets, SharedBuckets)
    buckets.steps(0, (), ALLREDUCE)
    try:
        buckets.steps(0, (), ALLREDUCE)
    except TransportError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_reduction_that_was_interrupted_is_not_taken_for_reduced() -> None:
    for text in run_ranks(3, begin_again, transport="shared_memory_only"):
        assert "bucket 0 was interrupted" in text
