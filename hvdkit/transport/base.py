"""What every transport offers: moving bytes inside a fixed group of ranks.

Collectives block and are called in the same order on all ranks of the group. Nothing here knows a framework: numbers
come as a Buffer, and what is done with them (adding, casting) is an Arithmetic: numpy's, or one that an adapter brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hvdkit.transport.between import BetweenHosts
    from hvdkit.transport.coding import Coder, Coding
    from hvdkit.transport.lane import Lane
    from hvdkit.transport.mailbox import Mailbox

Op = Literal["sum", "min", "max", "product"]

#: A dtype between hosts; "none" for the numbers' own.
Narrow = Literal["none", "float16", "bfloat16"]

Array = NDArray[Any]

#: 8-bit floating point, as torch and ml_dtypes name the variants. Moved, not reduced.
FLOAT8 = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
)

#: dtype name -> numpy dtype of the memory. numpy has neither bfloat16 nor float8: they travel as their bits.
STORAGE: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("i2"),
    "int32": np.dtype("i4"),
    "int64": np.dtype("i8"),
    "uint16": np.dtype("u2"),
    "uint32": np.dtype("u4"),
    "uint64": np.dtype("u8"),
    "bool": np.dtype("?"),
    "float16": np.dtype("f2"),
    "bfloat16": np.dtype("u2"),
    "float32": np.dtype("f4"),
    "float64": np.dtype("f8"),
    "complex64": np.dtype("c8"),
    "complex128": np.dtype("c16"),
    **dict.fromkeys(FLOAT8, np.dtype("u1")),
}

#: Summed in float32 and rounded once.
HALF = frozenset({"float16", "bfloat16"})

#: Real floating-point dtypes that are reduced.
FLOATS = HALF | {"float32", "float64"}

COMPLEX = frozenset({"complex64", "complex128"})

#: dtypes that are multiplied with factors as they are; integers are cut off (engine/execution.py).
SCALED = FLOATS | COMPLEX


def check_reduction(dtype: str, op: str, call: str) -> None:
    """Raise TypeError where no reduction of the dtype is defined. op: an Op, or "average". call: for the message."""
    if dtype in FLOAT8:
        raise TypeError(
            f"{call}: op {op} of {dtype} is not defined. With at most 4 bits of mantissa its sums overflow or are lost "
            "in rounding, and its values mean something only together with each rank's own scale. Cast to bfloat16 or "
            "float32, reduce, and cast back; broadcast, allgather and alltoall move it as it is."
        )
    if dtype in COMPLEX and op in ("min", "max"):
        raise TypeError(
            f"{call}: op {op} of {dtype} is not defined, as complex numbers have no order. Reduce their magnitudes, or "
            "real and imaginary parts apart."
        )


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous memory seen as numbers.

    array: (n,), of dtype STORAGE[dtype]; whoever made the buffer owns the memory.
    """

    array: Array
    dtype: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return int(self.array.nbytes)

    def slice(self, start: int, stop: int) -> Buffer:
        """The elements from `start` up to `stop`, sharing memory."""
        return Buffer(self.array[start:stop], self.dtype)


def as_buffer(array: Array) -> Buffer:
    """See a contiguous numpy array of any shape as a Buffer, sharing memory.

    Raises TypeError for a dtype that hvdkit does not move, ValueError for memory that is not contiguous.
    """
    name = array.dtype.name
    if name not in STORAGE:
        raise TypeError(f"dtype {array.dtype} cannot be moved; hvdkit moves {', '.join(STORAGE)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"a contiguous array is needed, this one has strides {array.strides}")
    return Buffer(array.reshape(-1).view(STORAGE[name]), name)


def make_buffer(count: int, dtype: str) -> Buffer:
    """A new uninitialised Buffer of `count` elements."""
    return Buffer(np.empty(count, STORAGE[dtype]), dtype)


class Arithmetic(Protocol):
    """What transports do with numbers."""

    def combine(self, out: Buffer, sources: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        """out = scale * op(sources), element by element; float16 and bfloat16 in float32, rounded once.

        out: may be one of `sources`; wider than they are if they are of 16 bits. scale: 1.0 for integers and bools.
        """

    def cast(self, out: Buffer, source: Buffer, scale: float = 1.0) -> None:
        """out = scale * source in out's dtype; finite values too large for it become its largest, inf and nan stay."""

    def copy(self, out: Buffer, source: Buffer) -> None:
        """out = source, same dtype."""


#: Stays in a core's own cache between the sum and the copies of it.
CHUNK_BYTES = 512 * 1024


class Matrix(NamedTuple):
    """A tensor of a bucket as a matrix, row by row; start: the element of the bucket that is its first."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True)
class BucketSpec:
    """One bucket of an agreed plan, the same on all ranks.

    count: elements. prescale: factor on each node's sum, before the wire. postscale: factor on the result.
    wire: dtype between hosts, "none" for the bucket's own; or a coding, which leaves the last `exact` elements as they
    are. matrices: the tensors before those, in rising order, where the coding is one of matrices.
    chunk_bytes: that a rank sums and hands out at a time, where ranks share memory. algorithm: between hosts, see
    BetweenHosts; that of the transport if it is "auto". Raises TypeError as check_reduction does.
    """

    dtype: str
    count: int
    op: Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    wire: Narrow | Coding = "none"
    exact: int = 0
    chunk_bytes: int = CHUNK_BYTES
    algorithm: str = "auto"
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        check_reduction(self.dtype, self.op, "a bucket")

    @property
    def narrow(self) -> Narrow:
        """The dtype between hosts of what is not coded."""
        return self.wire if isinstance(self.wire, str) else "none"

    @property
    def travels_as(self) -> str:
        """The dtype between hosts of what is not coded; the bucket's own if no other was asked for."""
        return self.dtype if self.narrow == "none" else self.narrow


def see_as(memory: NDArray[np.uint8], spec: BucketSpec) -> Buffer:
    """The beginning of `memory` as the numbers of a bucket."""
    storage = STORAGE[spec.dtype]
    return Buffer(memory[: spec.count * storage.itemsize].view(storage), spec.dtype)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Numbers of a bucket that are not in its memory.

    first: element of the bucket. source: the numbers. target: where the result goes, `source` itself or as much memory
    that does not overlap it. Both are left alone until the bucket is reduced.
    """

    first: int
    source: Buffer
    target: Buffer


class Buckets(Protocol):
    """The buckets of one plan in memory of the transport's choice, reduced in place, again and again.

    A round of bucket i: the user fills memory[i]; start(i); memory[i] is left alone until finished(i) or wait(i); then
    it holds the result, and is the user's. Buckets start in index order. Buckets i and i + depth share memory, so no
    more than `depth` of them are in use at a time.

    own: of each bucket the elements, as (start, stop), that only this rank reads: they need not be filled where start()
    is given the numbers that stand for them. An empty range where there are none.
    sent_bytes: how many bytes this rank gives to the network when all buckets are reduced once.
    """

    depth: int
    sent_bytes: int
    memory: Sequence[Buffer]
    own: Sequence[tuple[int, int]]

    def start(self, index: int, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """This rank's bucket is full: reduce it once the others' are.

        elsewhere: instead of memory's numbers; rising, within own[index].
        """

    def advance(self) -> bool:
        """Do what can be done without waiting; True if anything moved. Never blocks."""

    def finished(self, index: int) -> bool:
        """Is the bucket reduced? Only asks."""

    @property
    def busy(self) -> bool:
        """Is any bucket started and not yet reduced?"""

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Return when the bucket is reduced. Raises RankLostError if a rank it waits for has ended.

        watch: called now and then meanwhile, where that takes long; may raise.
        """

    def close(self) -> None:
        """Free the memory; a collective call."""


def whole(memory: Buffer, own: tuple[int, int], elsewhere: Sequence[Elsewhere]) -> list[Elsewhere]:
    """The elements from own[0] up to own[1]: those elsewhere, and between them memory's, which are reduced in place."""
    found: list[Elsewhere] = []
    at = own[0]
    for one in (*elsewhere, Elsewhere(own[1], empty := memory.slice(own[1], own[1]), empty)):
        if at < one.first:
            numbers = memory.slice(at, one.first)
            found.append(Elsewhere(at, numbers, numbers))
        if one.source.count:
            found.append(one)
        at = one.first + one.source.count
    return found


def plan_memory(specs: Sequence[BucketSpec], depth: int | None) -> list[int]:
    """The bytes of each piece of memory that the buckets take in turn: `depth` pieces, or one a bucket if None."""
    sizes = [spec.count * STORAGE[spec.dtype].itemsize for spec in specs]
    pieces = min(depth or len(specs), len(specs))
    return [max(sizes[turn::pieces]) for turn in range(pieces)]


class Transport(Protocol):
    """Moves bytes inside a fixed group of ranks; one implementation a file.

    Every method but the attributes is collective: all ranks of the group call it, in the same order, with arguments
    that agree. Raises TransportError (RankLostError where the dead rank is known) when the others cannot be reached.

    carrier: what moves bytes where ranks share no memory: "mpi", "gloo", or "none" for one rank.
    local_ranks: how many ranks are summed inside a host before the sum crosses to others (1 where nothing is), the
    same number on all ranks.
    """

    name: str
    carrier: str
    rank: int
    size: int
    local_ranks: int
    arithmetic: Arithmetic

    @property
    def between(self) -> BetweenHosts | None:
        """The algorithm of sums between hosts, and what was measured there; None where nothing crosses."""

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """Replace `buffer` (n,) by scale * the element-wise reduction over all ranks, in place.

        scale: 1.0 for integer and bool buffers; applied before float16 and bfloat16 are rounded.
        """

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """Reduce `buffer` (sum(counts),) over all ranks; rank i gets the i-th piece, (counts[i],), in new memory."""

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """Concatenate every rank's `buffer` (counts[rank],) in rank order into new memory, (sum(counts),)."""

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Fill `buffer` (n,) with the root's, in place."""

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """Send the i-th piece of `buffer` (sum(send_counts),) to rank i; returns what came, (sum(receive_counts),)."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """A transport of these ranks, numbered in the order given; None on the ranks left out."""

    def open_mailbox(self) -> Mailbox:
        """Make a way to send short messages between these ranks; collective."""

    def open_lane(self) -> Lane | None:
        """Make a way to show each other small messages at once, where these ranks have memory in common; collective."""

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """Make the buckets of an agreed plan, of which `depth` may be in use at a time; all of them if None."""

    def check(self) -> None:
        """Raise RankLostError if a rank of the group is known to have ended; asked while waiting, not collective."""

    def leave(self) -> None:
        """Tell the others, as far as that can be done alone, that this rank takes no further part; not collective."""

    def close(self, *, idle: bool = True) -> None:
        """Give everything back. Later calls of other methods are errors; closing twice is not.

        idle: False if ranks are lost, so that nothing can be said to the others any more; then not collective.
        """


#: Is told how many elements, from the first on, have come so far.
Reached = Callable[[int], None]


def nothing(_: int) -> None:
    """Is told, and does nothing."""


class Crossing(Protocol):
    """Reduces between hosts, beside a transport's own collectives."""

    def __call__(
        self,
        numbers: Buffer,
        spec: BucketSpec,
        *,
        coder: Coder | None = None,
        before: Reached = nothing,
        after: Reached = nothing,
    ) -> Iterator[bool]:
        """Reduce `numbers` (n,) in place, prescaled already, and postscale them; steps as in SteppedBuckets.

        coder: of spec.wire, for these numbers, where they are coded. before: called with growing counts, the last of
        them n: the first so many elements are needed now. after: the same, once the first so many are reduced.
        """

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. idle: False if a reduction was cut short."""


class BaseTransport(Transport, Protocol):
    """A transport that others are put on: it reaches ranks on any host, and knows who is where."""

    @property
    def between(self) -> BetweenHosts:
        """See Transport.between."""

    def subgroup(self, ranks: Sequence[int]) -> BaseTransport | None:
        """See Transport.subgroup."""

    def split_by_node(self, node: int | None = None) -> tuple[BaseTransport, BaseTransport]:
        """The ranks of this host, and the ranks with the same place on every host, both in rank order; collective.

        The second may be shorter on some ranks, where hosts have different numbers of ranks.
        node: the number of this rank's host, given by all ranks or none; the transport finds out if None.
        """

    def measure(self) -> None:
        """Find out what is fast between these ranks, where they stand on different hosts; collective."""

    def open_crossing(self) -> Crossing:
        """What reduces over these ranks in steps, where they stand on different hosts; collective."""
