"""Gloo as torch.distributed has it: stores, and groups with their collectives, begun now and asked after later.

The one file below the adapters that loads a framework, and only when ranks are to talk through Gloo. The groups are
hvdkit's own: torch's default group stays the script's to make.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.errors import MissingDependencyError, TransportError
from hvdkit.optional_import import optional_import
from hvdkit.transport.between.wire import Messages
from hvdkit.transport.buffer import Array, Buffer, Op
from hvdkit.transport.gloo.asking import wait_for_store
from hvdkit.transport.polling import calls, drives, look
from hvdkit.transport.request import NOTHING, Request

if TYPE_CHECKING:
    import torch

_THREADS = 2  # of a group: collectives that are under way at the same time
_START = timedelta(seconds=60)  # for the ranks of a group to connect; all of them are there by then
_STORE = timedelta(seconds=300)
_ANSWER = _START  # of a store in another process, where Gloo asks it
_FOR_EVER = timedelta(days=1000)  # who waits looks after the others itself, and a slow rank is no failed one
_LOOK = timedelta(milliseconds=100)

_TOGETHER_BYTES = 64 * 1024  # gathered in one exchange of equal pieces; more is sent piece by piece, and copied less

#: What Gloo adds up well; 16-bit floats it would round after every addition.
_REDUCIBLE = frozenset({"uint8", "int8", "int32", "int64", "bool", "float32", "float64"})

Explain = Callable[[str, Exception], Exception]


@functools.cache
def load_gloo() -> Any:
    """torch.distributed. Raises MissingDependencyError if torch is not installed, or was built without Gloo."""
    _torch()
    distributed = optional_import("torch.distributed", "torch")
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise MissingDependencyError(
            "The installed torch was built without Gloo (torch.distributed). Install a wheel from pytorch.org or "
            "PyPI, or start the ranks with hvdrun, which uses MPI."
        )
    return distributed


@functools.cache
def _torch() -> Any:
    return optional_import("torch", "torch")


def can_load_gloo() -> bool:
    """Is there a torch with Gloo? Loads torch."""
    try:
        load_gloo()
    except ImportError:
        return False
    return True


def host_store() -> Any:
    """A new store of torch's, served by this process."""
    return _open_store("127.0.0.1", 0, _STORE, is_master=True)


def host_store_at(address: str, port: int) -> Any:
    """A store at a port that was chosen before; the script may make its own groups through it as well."""
    return _open_store(address, port, _STORE, is_master=True, multi_tenant=True)


def join_store(address: str, port: int, timeout_s: float, deadline: float = 0.0, owner: str = "Rank 0") -> Any:
    """A store that another process serves.

    timeout_s: for the connection. deadline: for its first answer, on the clock of time.monotonic(), or the connection's
    if that is later. owner: whose process serves it, for messages. Raises TransportError.
    """
    load_gloo()
    opening = functools.partial(_open_store, address, port, timedelta(seconds=timeout_s), is_master=False)
    deadline = max(deadline, time.monotonic() + timeout_s)
    store = wait_for_store(f"{address}:{port}", opening, deadline=deadline, owner=owner)
    store.set_timeout(_ANSWER)
    return store


def _open_store(address: str, port: int, timeout: timedelta, **options: bool) -> Any:
    try:
        return load_gloo().TCPStore(address, port, timeout=timeout, wait_for_workers=False, **options)
    except RuntimeError as error:  # torch's DistNetworkError and its like
        raise TransportError(f"torch's TCPStore at {address}:{port} cannot be opened: {error}") from error


class GlooWire:
    """See Wire: a process group of Gloo, by itself. The same ranks, with the same name, make it together.

    address: of this host, which the others reach. explain: makes the error of a call that failed.
    """

    largest_count = sys.maxsize
    messages: Messages | None = None  # Gloo's can only be waited for

    def __init__(self, store: Any, name: str, rank: int, size: int, address: str, explain: Explain) -> None:
        self.rank, self.size = rank, size
        distributed = load_gloo()
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [_device(address)]
        options._threads = _THREADS
        options._timeout = _START
        self._explain = explain
        self._open: list[GlooRequest] = []
        try:
            self._group = gloo(distributed.PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise explain("connection of the ranks", error) from error
        _wires.add(self)

    def can_reduce(self, dtype: str) -> bool:
        return dtype in _REDUCIBLE

    def can_scatter(self, dtype: str) -> bool:
        return False

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> GlooRequest:
        if source is not out and source.array.ctypes.data != out.array.ctypes.data:
            out.array[:] = source.array
        array = out.array
        if out.dtype == "bool":
            array, op = array.view("u1"), "max" if op in ("sum", "max") else "min"
        if not array.size:
            return self._begin("allreduce", out, [])
        options = _options("AllreduceOptions", reduceOp=getattr(load_gloo().ReduceOp, op.upper()))
        tensor = _tensor(array)
        return self._begin("allreduce", out, [self._group.allreduce([tensor], options)], tensor)

    def reducescatter(self, source: Buffer, out: Buffer, counts: Sequence[int], op: Op) -> GlooRequest:
        raise NotImplementedError("Gloo scatters equal pieces only; see can_scatter()")

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> GlooRequest:
        tensors, options, itemsize = (_bytes_of(received), _bytes_of(sent)), _options("AllToAllOptions"), sent.itemsize
        nbytes = [[count * itemsize for count in counts] for counts in (receive_counts, send_counts)]
        return self._begin("alltoall", received, [self._group.alltoall_base(*tensors, *nbytes, options)], tensors)

    def allgather(self, gathered: Buffer, counts: Sequence[int], own: Buffer | None = None) -> GlooRequest:
        ends = np.cumsum(counts).tolist()
        pieces = [gathered.slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        mine = pieces[self.rank]
        if own is not None:
            mine.array[:] = own.array
        if len(set(counts)) > 1 or gathered.nbytes > _TOGETHER_BYTES:
            return self._broadcast(gathered, list(enumerate(pieces)))
        tensors = _bytes_of(gathered), _bytes_of(mine)
        works = [self._group._allgather_base(*tensors, _options("AllgatherOptions"))] if mine.nbytes else []
        return self._begin("allgather", gathered, works, tensors)

    def broadcast(self, buffer: Buffer, root: int) -> GlooRequest:
        return self._broadcast(buffer, [(root, buffer)])

    def _broadcast(self, out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> GlooRequest:
        """Fill each piece of `out` with the root's, given before it; all at once."""
        moved = [
            (_bytes_of(piece), _options("BroadcastOptions", rootRank=root)) for root, piece in pieces if piece.nbytes
        ]
        works = [self._group.broadcast([tensor], options) for tensor, options in moved]
        return self._begin("broadcast", out, works, moved)

    def barrier(self) -> GlooRequest:
        return self._begin("barrier", NOTHING, [self._group.barrier(_options("BarrierOptions"))])

    def _begin(self, what: str, out: Buffer, works: Sequence[Any], memory: object = None) -> GlooRequest:
        calls().begun += 1
        self._open = [request for request in self._open if not request.over]
        request = GlooRequest(what, works, out, memory, self._explain)
        self._open.append(request)
        return request

    def close(self, *, idle: bool = True) -> None:
        """See Wire.close. One that is not idle knows that by itself."""
        if any(not request.over for request in self._open):
            # Its end would wait for what is under way, and nobody may be there any more to bring that to an end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None
        self._open = []


#: Those that are open.
_wires: weakref.WeakSet[GlooWire] = weakref.WeakSet()


@atexit.register
def _close_wires() -> None:
    """End Gloo's threads while Python is there: one that asks for it later ends the process with SIGABRT."""
    for wire in list(_wires):
        wire.close()


class GlooRequest(Request):
    """See Request. memory: what Gloo reads and writes until then. explain: see GlooWire."""

    def __init__(self, what: str, works: Sequence[Any], out: Buffer, memory: object, explain: Explain) -> None:
        self.out = out
        self._what, self._works, self._memory, self._explain = what, works, memory, explain

    @property
    def over(self) -> bool:
        """Has it been done, or failed?"""
        return all(work.is_completed() for work in self._works)

    def done(self) -> bool:
        if not self.over:
            return False
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._explain(self._what, error) from error
        self._works, self._memory = (), None
        return True

    def wait(self) -> Buffer:
        """See Request.wait. The thread sleeps in Gloo, unless its waits have something to drive."""
        if drives():
            return super().wait()
        try:
            for work in self._works:
                while not work.is_completed():
                    with contextlib.suppress(RuntimeError):  # the time is up; or it failed, which done() tells
                        work.wait(_LOOK)
                        continue
                    look()
                    if self.check is not None:
                        self.check()
            self.done()
        except BaseException:
            calls().uncertain = True
            raise
        return self.out


@functools.lru_cache(maxsize=4)
def _device(address: str) -> Any:
    return load_gloo().ProcessGroupGloo.create_device(hostname=address)


def _options(name: str, **values: object) -> Any:
    options = getattr(load_gloo().distributed_c10d, name)()
    options.timeout = _FOR_EVER
    for field, value in values.items():
        setattr(options, field, value)
    return options


def _tensor(array: Array) -> torch.Tensor:
    tensor: torch.Tensor = _torch().from_numpy(array if array.flags.writeable else array.copy())
    return tensor


def _bytes_of(buffer: Buffer) -> torch.Tensor:
    return _tensor(buffer.array.view("u1"))
