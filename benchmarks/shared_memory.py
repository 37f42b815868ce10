"""The ways in which ranks of one host do an allreduce or a broadcast in shared memory, each at sizes of all of them.

    hvdrun -np 2 python -m benchmarks.shared_memory

All follow one protocol (hvdkit/transport/shared/steps.py). "slots" is SmallCollectives, "chunks" is ChunkedAllreduce or
ChunkedExchange, "buckets" SharedBuckets of at most 2 MiB, filled and taken out, as between hosts. No engine and no
names: collectives follow each other without a pause. Ratios are of a way's time to that of the first way in the table,
each within its round. The machine must be idle: a rank that has lost its core is what is measured otherwise.
"""

from __future__ import annotations

import functools

import numpy as np

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int, positive_seconds
from hvdkit.tools.bench.report import show_bytes, summarise
from hvdkit.tools.bench.timing import Call, Turn, interleave, plan_calls, time_in_a_row
from hvdkit.tools.bench.worker import joined
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.mpi.transport import open_mpi
from hvdkit.transport.shared.collectives import STAGE_BYTES, ChunkedAllreduce, ChunkedExchange, SmallCollectives
from hvdkit.transport.shared.transport import SharedMemoryTransport

_SMALL, _LARGE = (4, 2**12, 2**14, 2**15, 2**16), (2**17, 2**19, 2**20, 2**22, 2**24)
_DIRECTORY = "/dev/shm"
_DEPTH = 2


def _reduce_in_buckets(buckets: Buckets, buffer: Buffer) -> None:
    """Reduce `buffer` by way of buckets, two at a time; this rank's shard of each stays where it is."""
    step, count = buckets.memory[0].count, len(buckets.memory)
    chunks = [buffer.slice(step * index, step * (index + 1)) for index in range(count)]

    def collect(index: int) -> None:
        buckets.wait(index)
        memory, array, (start, stop) = buckets.memory[index].array, chunks[index].array, buckets.owned[index]
        array[:start], array[stop:] = memory[:start], memory[stop:]

    for index, chunk in enumerate(chunks):
        if index >= _DEPTH:
            collect(index - _DEPTH)
        memory, (start, stop) = buckets.memory[index].array, buckets.owned[index]
        memory[:start], memory[stop:] = chunk.array[:start], chunk.array[stop:]
        own = chunk.slice(start, stop)
        buckets.start(index, [InPlaceSegment(start, own, own)])
    for index in range(max(0, count - _DEPTH), count):
        collect(index)


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=201)
    parser.add_argument("--seconds", type=positive_seconds, default=0.001, help="how long a way's turn takes, about")
    options = parser.parse_args()
    rows = []
    with joined(threads=1, alone=True):
        base, numbers = open_mpi(), NumpyArithmetic()
        transport = SharedMemoryTransport(base, base, host="this host")
        slots = SmallCollectives(base, _DIRECTORY, transport.check)
        chunks = ChunkedAllreduce(base, _DIRECTORY, transport.check)
        exchange = ChunkedExchange(base, _DIRECTORY, transport.check)
        for nbytes in (*_SMALL, *_LARGE):
            buffer = make_buffer(nbytes // 4, "float32")
            buffer.array[:] = np.zeros(1)
            size = min(nbytes, STAGE_BYTES) // 4
            buckets = transport.open_buckets([BucketSpec("float32", size)] * (buffer.count // size), _DEPTH)
            works: dict[str, dict[str, Call]] = {
                "allreduce": {
                    "slots": functools.partial(slots.allreduce, buffer, "sum", 1.0, numbers),
                    "chunks": functools.partial(chunks.allreduce, buffer, "sum", 1.0, numbers),
                    "buckets": functools.partial(_reduce_in_buckets, buckets, buffer),
                }
            }
            if nbytes in _SMALL:
                works["broadcast"] = {
                    "slots": functools.partial(slots.broadcast, buffer, 0, numbers),
                    "chunks": functools.partial(exchange.broadcast, buffer, 0),
                }
            else:
                del works["allreduce"]["slots"]
            for work, calls in works.items():
                turns: dict[str, Turn] = {
                    name: functools.partial(time_in_a_row, call, base.barrier) for name, call in calls.items()
                }
                first = next(iter(turns))
                times = interleave(turns, plan_calls(turns, options.seconds), options.rounds)
                for name, figures in summarise(times, first).items():
                    rows.append(Row(f"{work}, {show_bytes(nbytes)}", name, figures.median_s, figures.ratio, first))
            buckets.close()
        for memory in (slots, chunks, exchange):
            memory.close()
        transport.close()
        finish(rows, f"{hvd.describe()}.", options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
