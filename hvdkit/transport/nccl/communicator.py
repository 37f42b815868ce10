"""A communicator of NCCL, which connects without blocking and is aborted when a rank is lost."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_void_p

from hvdkit.errors import TransportError
from hvdkit.transport.nccl.library import (
    BYTES,
    HOST_SCALAR,
    OPERATIONS,
    REDUCIBLE,
    Library,
    Result,
    UniqueId,
    calling,
    make_config,
)
from hvdkit.transport.polling import Backoff

#: Returns rank 0's argument on every rank; collective among the ranks of the communicator.
Broadcast = Callable[[bytes], bytes]


class Communicator:
    """Enqueues collectives of device memory on streams; addresses are integers, counts are numbers of elements.

    A call returns when the operation is enqueued. All ranks make the same calls in the same order, from one thread at a
    time.

    library: the opened libnccl.
    rank: this rank's number in the communicator.
    size: number of ranks.
    broadcast: see Broadcast.
    where: this rank with its host and GPU, for messages, as "rank 3 on node1, GPU 0".
    check: called while NCCL connects ranks; raises RankLostError if a rank has ended.
    timeout_s: limit of the time to connect, in seconds.
    """

    def __init__(
        self,
        library: Library,
        rank: int,
        size: int,
        broadcast: Broadcast,
        where: str,
        check: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Connect the ranks; collective. It uses the calling thread's current CUDA device.

        Raises NcclError if NCCL fails, RankLostError if check() does, TransportError after `timeout_s` seconds.
        """
        self.library, self.rank, self.size, self.where = library, rank, size, where
        self._check, self._timeout_s = check, timeout_s
        self._scaled_sums: dict[tuple[str, float], int] = {}
        self._freeing = threading.Lock()  # so that only one of two aborting threads frees it
        unique_id = UniqueId()
        if rank == 0:
            library.call("ncclGetUniqueId", unique_id, where=where)
        identity = broadcast(unique_id.to_bytes())
        ctypes.memmove(ctypes.byref(unique_id), identity, len(identity))
        handle, connect = c_void_p(), "ncclCommInitRankConfig"
        library.call(connect, handle, size, unique_id, rank, make_config(), where=where, handle=handle)
        self._handle: c_void_p | None = handle
        try:
            self._complete(connect)
        except BaseException:
            self.abort()
            raise

    def scaled_sum(self, dtype: str, factor: float) -> int:
        """Return NCCL's operation that multiplies every rank's numbers by `factor`, in their dtype, and adds them up.

        dtype: a name in REDUCIBLE, floating-point unless the factor is 1.
        """
        if factor == 1.0:
            return OPERATIONS["sum"]
        key = (dtype, factor)
        if key not in self._scaled_sums:
            scalar, operation = ctypes.create_string_buffer(encode_scalar(dtype, factor), 8), c_int()
            arguments = (operation, scalar, REDUCIBLE[dtype], HOST_SCALAR, self._handle)
            self._call("ncclRedOpCreatePreMulSum", *arguments)
            self._scaled_sums[key] = operation.value
        return self._scaled_sums[key]

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Enqueue ncclAllReduce; target may be source."""
        self._call("ncclAllReduce", source, target, count, dtype, op, self._handle, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Enqueue ncclReduceScatter. count: elements of the result; the source has `size` times as many."""
        self._call("ncclReduceScatter", source, target, count, dtype, op, self._handle, stream)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Enqueue ncclReduce; target is used only on the root."""
        self._call("ncclReduce", source, target, count, dtype, op, root, self._handle, stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """Enqueue ncclAllGather. count: elements of the source; the result has `size` times as many."""
        self._call("ncclAllGather", source, target, count, dtype, self._handle, stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        """Enqueue ncclBroadcast of `nbytes` bytes."""
        self._call("ncclBroadcast", source, target, nbytes, BYTES, root, self._handle, stream)

    def all_to_all(
        self,
        sources: Sequence[tuple[int, int]],
        targets: Sequence[tuple[int, int]],
        stream: int,
    ) -> None:
        """Enqueue the exchange of a memory block with every rank, as one operation of ncclSend and ncclRecv.

        sources: address and number of bytes to send to each rank. targets: address and number of bytes to receive from
        each rank.
        """
        with self.grouped():
            for peer, ((source, sent), (target, received)) in enumerate(zip(sources, targets, strict=True)):
                if sent:
                    self._call("ncclSend", source, sent, BYTES, peer, self._handle, stream)
                if received:
                    self._call("ncclRecv", target, received, BYTES, peer, self._handle, stream)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Return a context that collects calls, and at its end enqueues them as one operation."""
        with calling:  # an abort would free operations that NCCL enqueues at the end of the group
            self.library.call("ncclGroupStart", where=self.where)
            try:
                yield
            finally:
                # Also if the communicator was aborted inside: else all later calls of this thread would be collected.
                result = self.library.call("ncclGroupEnd", where=self.where, handle=self._handle)
        if result is Result.IN_PROGRESS:
            self._complete("ncclGroupEnd")

    def check(self) -> None:
        """Raise NcclError if an enqueued operation has failed since; the communicator cannot be used any more then."""
        if (result := self._state()) not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise self.library.error("an operation of NCCL", result, self.where, self._handle)

    def abort(self) -> None:
        """End this rank's operations in progress, and free the communicator; not collective; may be called twice."""
        with self._freeing:
            handle, self._handle = self._handle, None
        if handle is not None:
            self.library.abort(handle, self.where)

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait for operations in progress, and free the communicator; collective; may be called twice.

        Raises TransportError after `timeout_s` seconds, after aborting the communicator.
        """
        if self._handle is None:
            return
        self._timeout_s = timeout_s
        try:
            self._call("ncclCommFinalize", self._handle)
        except BaseException:
            self.abort()
            raise
        with self._freeing:
            handle, self._handle = self._handle, None
        if handle is not None:
            self.library.call("ncclCommDestroy", handle, where=self.where)

    def _call(self, function: str, *arguments: object) -> None:
        with calling:  # inside, no other thread frees the communicator
            if self._handle is None:
                raise self._closed(function)
            result = self.library.call(function, *arguments, where=self.where, handle=self._handle)
        if result is Result.IN_PROGRESS:
            self._complete(function)

    def _closed(self, function: str) -> TransportError:
        return TransportError(f"{function}: this communicator of {self.where} has been closed or aborted.")

    def _state(self) -> int:
        state = c_int()
        with calling:
            if self._handle is None:  # another thread has aborted it
                raise self._closed("ncclCommGetAsyncError")
            self.library.call("ncclCommGetAsyncError", self._handle, state, where=self.where, handle=self._handle)
        return state.value

    def _complete(self, function: str) -> None:
        """Wait until NCCL has done the host's work of a call, mostly connecting; raises as check() does."""
        deadline = time.monotonic() + self._timeout_s
        waiting = Backoff(self._check)
        while (result := self._state()) == Result.IN_PROGRESS:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"{function} was not done after {self._timeout_s:g} s on {self.where}: the usual causes are that "
                    f"one of the {self.size} ranks has not called it, or that ranks do not reach each other. Compare "
                    "NCCL_SOCKET_IFNAME with the interfaces of the hosts. NCCL_DEBUG=INFO in the environment of the "
                    "ranks shows NCCL's own log."
                )
            waiting.pause()
        if result != Result.SUCCESS:
            raise self.library.error(function, result, self.where, self._handle)


def encode_scalar(dtype: str, value: float) -> bytes:
    """Encode a number in a floating-point dtype, rounded to nearest. Raises KeyError for any other dtype."""
    if dtype == "bfloat16":
        bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return struct.pack({"float16": "<e", "float32": "<f", "float64": "<d"}[dtype], value)
