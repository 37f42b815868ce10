"""Reduces over a wire in steps, in the buffer's dtype or in a narrower wire dtype.

MPI has no 16-bit floats, and MPI and Gloo would round after every addition. So each rank gets one shard of all ranks'
numbers, adds them in float32 and sends the sum to all. Dtypes that a wire cannot add at all are reduced the same way:

    rank 0   a0 b0 c0        a0 a1 a2  ->  A        A B C
    rank 1   a1 b1 c1   ->   b0 b1 b2  ->  B   ->   A B C
    rank 2   a2 b2 c2        c0 c1 c2  ->  C        A B C
             (alltoallv)      (combine)    (allgatherv)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic
from hvdkit.transport.between.schedules import split_evenly
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import HALF, Buffer, make_buffer
from hvdkit.transport.polling import Backoff
from hvdkit.transport.request import Request, detach_buffers

_BLOCK = 64 * 1024  # elements that are widened, added and narrowed while they are in the cache


def reduce_steps(
    wire: Wire,
    source: Buffer,
    out: Buffer,
    spec: BucketSpec,
    *,
    arithmetic: Arithmetic,
    prescale: float = 1.0,
    at_once: bool = True,
) -> Iterator[bool]:
    """Reduce `source` over the ranks of `wire` into `out` (n,) by its collectives, as steps of SteppedBuckets.

    wire: the ranks and their collectives.
    source: (n,); may be `out`, else it is only read.
    out: (n,), for the result.
    spec: its op, wire and postscale are used; n may differ from its count.
    arithmetic: adds and casts the numbers.
    prescale: factor on `source`, before the wire. The caller passes spec.prescale here, or has applied it.
    at_once: use the wire's own allreduce if it can add up the dtype.
    Yields False while a collective is still to be posted, True when the last collective has been posted. Values too
    large for a wire dtype are clamped, before and after the sum; in a bucket of 16-bit floats itself they become inf.
    """
    dtype = spec.wire_dtype
    # Minus the number of ranks, because each rank receives a shard rounded up to whole elements from each rank.
    largest = wire.largest_count - wire.size
    for start in range(0, out.count, largest):
        stop = min(start + largest, out.count)
        pieces = source.slice(start, stop), out.slice(start, stop)
        steps = (
            _through_pieces(wire, *pieces, spec, arithmetic, prescale)
            if not at_once or dtype in HALF or not wire.can_reduce(dtype)
            else _at_once(wire, *pieces, spec, arithmetic, prescale)
        )
        for free in steps:
            yield free and stop == out.count


def sum_steps(wire: Wire, buffer: Buffer, *, free: bool) -> Iterator[bool]:
    """Sum `buffer` (n,) over the ranks in place, with the same bits on all ranks; yields False until the last step.

    free: the value that the last step yields.
    """
    spec = BucketSpec(buffer.dtype, buffer.count)
    for last in _through_pieces(wire, buffer, buffer, spec, NumpyArithmetic(), 1.0):
        yield last and free


def _at_once(
    wire: Wire, source: Buffer, out: Buffer, spec: BucketSpec, arithmetic: Arithmetic, prescale: float
) -> Iterator[bool]:
    if prescale != 1.0:
        arithmetic.combine(out, [source], scale=prescale)
        source = out
    yield from until_done(wire.allreduce(source, out, spec.op), free=True)
    if spec.postscale != 1.0:
        arithmetic.combine(out, [out], scale=spec.postscale)


def _through_pieces(
    wire: Wire, source: Buffer, out: Buffer, spec: BucketSpec, arithmetic: Arithmetic, prescale: float
) -> Iterator[bool]:
    sent, received = yield from _exchange_pieces(wire, source, spec.wire_dtype, arithmetic, prescale, free=False)
    gathered = out if spec.wire_dtype == out.dtype else sent
    combine_pieces(gathered.slice(*own_range(wire, out.count)), received, spec, arithmetic)
    yield from all_gather_steps(wire, gathered)
    if gathered is not out:
        arithmetic.cast(out, gathered)


def reduce_scatter_steps(
    wire: Wire, numbers: Buffer, spec: BucketSpec, arithmetic: Arithmetic, prescale: float
) -> Iterator[bool]:
    """Reduce own_range() of `numbers` (n,) over the ranks of `wire`, in place, in one collective.

    wire: the ranks and their collectives.
    numbers: (n,), this rank's numbers.
    spec: see reduce_steps().
    arithmetic: adds and casts the numbers.
    prescale: factor on `numbers`, before the wire.
    """
    _, received = yield from _exchange_pieces(wire, numbers, spec.wire_dtype, arithmetic, prescale, free=True)
    combine_pieces(numbers.slice(*own_range(wire, numbers.count)), received, spec, arithmetic)


def all_gather_steps(wire: Wire, numbers: Buffer) -> Iterator[bool]:
    """Fill `numbers` (n,) with the own_range() of every rank of `wire`, in one collective; see reduce_steps()."""
    yield from until_done(wire.allgather(numbers, split_evenly(numbers.count, wire.size)), free=True)


def own_range(wire: Wire, count: int) -> tuple[int, int]:
    """Return the elements of `count`, as (start, stop), that this rank adds up: its nearly equal share."""
    edges = [0, *itertools.accumulate(split_evenly(count, wire.size))]
    return edges[wire.rank], edges[wire.rank + 1]


def _exchange_pieces(
    wire: Wire, source: Buffer, dtype: str, arithmetic: Arithmetic, prescale: float, *, free: bool
) -> Generator[bool, None, tuple[Buffer, Buffer]]:
    """Send each rank its shard of `source` (n,); return the sent numbers, (n,), and the received ones in rank order."""
    counts = split_evenly(source.count, wire.size)
    sent = source
    if dtype != source.dtype:
        sent = make_buffer(source.count, dtype)
        arithmetic.cast(sent, source, prescale)
    elif prescale != 1.0:
        sent = make_buffer(source.count, dtype)
        arithmetic.combine(sent, [source], scale=prescale)
    mine = counts[wire.rank]
    received = make_buffer(mine * wire.size, dtype)
    yield from until_done(wire.alltoall(sent, counts, received, [mine] * wire.size), free=free)
    return sent, received


def combine_pieces(out: Buffer, received: Buffer, spec: BucketSpec, arithmetic: Arithmetic) -> None:
    """Set out (n,) = postscale * op(received), where `received` holds (n,) from each rank, one after another."""
    if not out.count:
        return
    pieces = [received.slice(at, at + out.count) for at in range(0, received.count, out.count)]
    add_up(out, pieces, spec, arithmetic, spec.postscale)


def add_up(out: Buffer, sources: Sequence[Buffer], spec: BucketSpec, arithmetic: Arithmetic, scale: float) -> None:
    """Set out (n,) = scale * op(sources), in this order, by the rules for numbers from the wire.

    With a wire dtype, a 16-bit sum is clamped when it is rounded; without, it may become inf.
    out: for the result; may be one of `sources`.
    sources: (n,) each.
    spec: its op and wire dtype are used.
    arithmetic: adds and casts the numbers.
    scale: factor on the sum.
    """
    if spec.narrow == "none" or out.dtype not in HALF:
        arithmetic.combine(out, sources, spec.op, scale)
        return
    total = make_buffer(min(_BLOCK, out.count), "float32")
    for start in range(0, out.count, _BLOCK):
        stop = min(start + _BLOCK, out.count)
        part = total.slice(0, stop - start)
        arithmetic.combine(part, [source.slice(start, stop) for source in sources], spec.op)
        arithmetic.cast(out.slice(start, stop), part, scale)


def finish_steps(steps: Iterator[bool], check: Callable[[], None]) -> None:
    """Do all steps, and return at their end. check: called in waits; may raise."""
    waiting = Backoff(check)
    try:
        for _ in steps:
            waiting.pause()
    except BaseException:  # also Ctrl-C: the library may still write to the memory of the operation
        detach_buffers(steps)
        raise


def until_done(request: Request, free: bool) -> Iterator[bool]:
    """Yield `free` until the request is done."""
    try:
        while not request.done():
            yield free
    except BaseException:
        detach_buffers(request)
        raise
