"""The transport with collectives and mailboxes in the shared memory of a host; the base transport does all else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdkit.errors import RankLostError
from hvdkit.transport.api import Transport, check_counts, check_root
from hvdkit.transport.arithmetic import Arithmetic, check_reduction, check_scale
from hvdkit.transport.between.buckets import WireCrossing
from hvdkit.transport.buckets import BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import HALF, Buffer, Op, make_buffer
from hvdkit.transport.division import Groups, find_group
from hvdkit.transport.mailbox import Mailbox, OpeningMailbox
from hvdkit.transport.polling import watch_waits
from hvdkit.transport.request import Request
from hvdkit.transport.shared.buckets import SharedBuckets
from hvdkit.transport.shared.collectives import (
    MOST_SUMMED_BYTES,
    STAGE_BYTES,
    ChunkedAllreduce,
    ChunkedExchange,
    SmallCollectives,
    slot_bytes,
)
from hvdkit.transport.shared.liveness import Liveness
from hvdkit.transport.shared.mailbox import open_shared_mailbox

_STAGES = 2
_MOST_GATHERED_BYTES = 4 * 2**20  # above, the base gathers: MPI needs one copy only if it may read a peer's memory

Opened = TypeVar("Opened", SmallCollectives, ChunkedAllreduce, ChunkedExchange)


class SharedMemoryTransport(Transport):
    """Uses shared memory between the ranks of a host, on top of a transport of all ranks of the group.

    base: transport of all ranks of the group; does operations for which shared memory is not faster; closed with this.
    local: transport of the group's ranks on this host, which share memory; `base` itself if these are all.
    host: name of this host, for messages.
    directory: a memory file system that the ranks of this host share.
    small_bytes: an allreduce between hosts of fewer bytes goes to `base`.
    shards: see SharedBuckets; None for all ranks of one host.
    open_crossing: makes the crossing of SharedBuckets; None on one host, and on ranks that reduce no shard.
    job_rank: see World, for messages.
    members: the world rank of each rank, if the group is not the whole world; else None.
    liveness: of the group's ranks on this host, from the world's Liveness.of(); None for the whole world.
    """

    name = "shared_memory"
    checks_ranks = True

    def __init__(
        self,
        base: Transport,
        local: Transport,
        *,
        host: str,
        directory: str = "/dev/shm",
        small_bytes: int = 64 * 1024,
        shards: int | None = None,
        open_crossing: Callable[[], WireCrossing] | None = None,
        job_rank: int | None = None,
        members: Sequence[int] | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.rank, self.size, self.backend = base.rank, base.size, base.backend
        self._base, self._local, self._host = base, local, host
        self._directory, self._small_bytes = directory, small_bytes
        self.shards, self._open_crossing = shards or local.size, open_crossing
        self.local_ranks = self.shards
        self._job_rank = job_rank
        self._members = range(base.size) if members is None else members
        self._is_part = members is not None
        self._liveness = liveness or Liveness(local, host, directory, base.rank, job_rank)
        self._staging: SharedBuckets | None = None
        self._slot_bytes = slot_bytes(base.size) if local.size == base.size else 0
        self._slots: SmallCollectives | None = None
        self._stage: ChunkedAllreduce | None = None
        self._opened_exchange: ChunkedExchange | None = None
        self._opened: list[SmallCollectives | ChunkedAllreduce | ChunkedExchange] = []
        self._closed = False

    @property
    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic, which adds and casts the numbers."""
        return self._base.arithmetic

    @arithmetic.setter
    def arithmetic(self, arithmetic: Arithmetic) -> None:
        self._base.arithmetic = arithmetic
        self._drop_staging()

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        if scale != 1.0:
            check_scale(buffer.dtype, scale)
        nbytes = buffer.array.nbytes
        if 0 < nbytes <= min(self._slot_bytes, MOST_SUMMED_BYTES):
            self._slots = self._slots or self._open(SmallCollectives)
            self._slots.allreduce(buffer, op, scale, self._base.arithmetic)
            return
        if nbytes and self._slot_bytes:
            self._stage = self._stage or self._open(ChunkedAllreduce)
            self._stage.allreduce(buffer, op, scale, self._base.arithmetic)
            return
        if nbytes < self._small_bytes or not nbytes:
            self._base.allreduce(buffer, op, scale)
            return
        if self._staging is None:
            self._staging = self.open_buckets([BucketSpec("uint8", STAGE_BYTES)] * _STAGES)
        stages, arithmetic, before = self._staging, self.arithmetic, 1.0
        if self.between is not None and buffer.dtype in HALF and op == "sum" and 0.0 < scale < 1.0:
            before = max(scale, 1 / self.local_ranks)  # a host's sum may overflow 16 bits, its mean does not
        step = STAGE_BYTES // buffer.array.itemsize
        pieces = [buffer.slice(at, min(at + step, buffer.count)) for at in range(0, buffer.count, step)]
        for turn, piece in enumerate(pieces):
            stage = turn % _STAGES
            if turn >= _STAGES:
                self._collect(stages, stage, pieces[turn - _STAGES])
            stages.change(stage, BucketSpec(buffer.dtype, piece.count, op, before, scale / before))
            start, stop = stages.owned[stage]
            for first, last in ((0, start), (stop, piece.count)):
                arithmetic.copy(stages.memory[stage].slice(first, last), piece.slice(first, last))
            mine = piece.slice(start, stop)
            stages.start(stage, [InPlaceSegment(start, mine, mine)])
        for turn in range(max(0, len(pieces) - _STAGES), len(pieces)):
            self._collect(stages, turn % _STAGES, pieces[turn])

    def _collect(self, stages: SharedBuckets, stage: int, piece: Buffer) -> None:
        stages.wait(stage)
        start, stop = stages.owned[stage]
        for first, last in ((0, start), (stop, piece.count)):
            self.arithmetic.copy(piece.slice(first, last), stages.memory[stage].slice(first, last))

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        if not self._slot_bytes:
            return self._base.reducescatter(buffer, counts, op)
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        check_reduction(buffer.dtype, op, "reducescatter")
        out = make_buffer(counts[self.rank], buffer.dtype)
        self._exchange.reducescatter(out, buffer.pieces(counts), op, 1.0, self.arithmetic)
        return out

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        nbytes = sum(counts) * buffer.array.itemsize
        if not self._slot_bytes or not self._slot_bytes < nbytes <= _MOST_GATHERED_BYTES:
            return self._base.allgather(buffer, counts)
        check_counts("allgather", counts, self.size, total=None)
        check_counts("allgather", [counts[self.rank]], 1, total=buffer.count)
        out = make_buffer(sum(counts), buffer.dtype)
        self._exchange.allgather(out.pieces(counts), buffer)
        return out

    def broadcast(self, buffer: Buffer, root: int) -> None:
        if 0 < buffer.array.nbytes <= self._slot_bytes:
            check_root(root, self.size)
            self._slots = self._slots or self._open(SmallCollectives)
            self._slots.broadcast(buffer, root, self._base.arithmetic)
        elif buffer.array.nbytes and self._slot_bytes:
            check_root(root, self.size)
            self._exchange.broadcast(buffer, root)
        else:
            self._base.broadcast(buffer, root)

    @property
    def _exchange(self) -> ChunkedExchange:
        self._opened_exchange = self._opened_exchange or self._open(ChunkedExchange)
        return self._opened_exchange

    def _open(self, kind: type[Opened]) -> Opened:
        """Open memory; collective, so functools.cached_property, with one lock before Python 3.12, cannot be used."""
        memory = kind(self._base, self._directory, self._liveness.check)
        self._opened.append(memory)
        return memory

    def allgather_into(self, pieces: Sequence[Buffer], buffer: Buffer) -> None:
        if self._slot_bytes:
            self._exchange.allgather(pieces, buffer)
        else:
            super().allgather_into(pieces, buffer)

    def reducescatter_into(self, out: Buffer, pieces: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        check_scale(out.dtype, scale)
        if self._slot_bytes:
            self._exchange.reducescatter(out, pieces, op, scale, self.arithmetic)
        else:
            super().reducescatter_into(out, pieces, op, scale)

    def alltoall_into(self, received: Sequence[Buffer], sent: Sequence[Buffer]) -> None:
        if self._slot_bytes:
            self._exchange.alltoall(received, sent)
        else:
            super().alltoall_into(received, sent)

    def gather_into(self, pieces: Sequence[Buffer], buffer: Buffer, root: int) -> None:
        if self._slot_bytes:
            self._exchange.gather(pieces, buffer, root)
        else:
            super().gather_into(pieces, buffer, root)

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        return self._base.alltoall(buffer, send_counts, receive_counts)

    def barrier(self) -> None:
        self._base.barrier()

    def begin_message(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Request:
        """See Transport.begin_message. The base cannot detect ended processes, so this transport checks them."""
        return self._watched(self._base.begin_message(buffer, peer, tag, sends=sends))

    def split(self, groups: Groups) -> Transport | None:
        base = self._base.split(groups)
        number = find_group(groups, self.rank)
        if base is None or number is None or base.size == 1:
            return base
        return self._above(base, groups[number])

    def create_group(self, ranks: Sequence[int]) -> Transport:
        base = self._base.create_group(ranks)
        return base if base.size == 1 else self._above(base, ranks)

    def _above(self, base: Transport, ranks: Sequence[int]) -> Transport:
        """Make a transport like this for some of its ranks. base: base transport of these ranks."""
        return SharedMemoryTransport(base, base, **self._options_of(ranks))

    def _options_of(self, group: Sequence[int]) -> dict[str, Any]:
        """Return the constructor's options for the transport of some of these ranks."""
        members = [self._members[rank] for rank in group]
        everyone = not self._is_part and members == list(range(self.size))
        return {
            "host": self._host,
            "directory": self._directory,
            "small_bytes": self._small_bytes,
            "job_rank": self._job_rank,
            "members": None if everyone else members,
            "liveness": self._liveness.of(members),
        }

    def open_mailbox(self) -> Mailbox:
        if self._local.size == self._base.size:
            opening = functools.partial(open_shared_mailbox, self._base, self._directory)
            return OpeningMailbox(opening, self.check) if self._is_part else opening()
        return self._base.open_mailbox()

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> SharedBuckets:
        if self.between is not None:
            self.between.check(specs)
        return SharedBuckets(
            self._local,
            specs,
            arithmetic=self.arithmetic,
            check=self.check,
            directory=self._directory,
            shards=self.shards,
            depth=depth,
            crossing=self._open_crossing() if self._open_crossing else None,
        )

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def check(self) -> None:
        """See Transport.check. The base may know of ranks on other hosts."""
        self._liveness.check()
        self._base.check()

    def leave(self) -> None:
        self._liveness.leave()
        self._base.leave()

    def _all_close(self) -> bool:
        """Wait until all ranks close, so that none takes an orderly end for a loss; False if one ended before that."""
        outer = watch_waits(None)

        def check_wait() -> None:
            if outer is not None:
                outer()
            self._liveness.check()

        watch_waits(check_wait)
        try:
            self._base.barrier()
        except RankLostError:
            return False
        finally:
            watch_waits(outer)
        return True

    def close(self, *, idle: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        idle = idle and self._all_close()
        self._liveness.close()
        self._drop_staging()
        for memory in self._opened:
            memory.close()
        if self._local is not self._base:
            self._local.close(idle=idle)
        self._base.close(idle=idle)
