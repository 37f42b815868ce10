"""Gloo, as part of torch.distributed: its stores, and its groups with nonblocking collectives.

This is the only file below the adapters that loads a framework, and only when ranks communicate over Gloo. The groups
are hvdkit's own; the script can still make torch's default group.
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
from hvdkit.transport.gloo.store_timeout import wait_for_store
from hvdkit.transport.polling import calls, check_wait, drives
from hvdkit.transport.request import NOTHING, Request

if TYPE_CHECKING:
    import torch

_THREADS = 2  # of a group: limit of its collectives in progress at the same time
_START = timedelta(seconds=60)  # timeout for the ranks of a group to connect; before, all have called _assemble()
_STORE = timedelta(seconds=300)
_ANSWER = _START  # timeout of a store in another process, when Gloo queries it
_FOR_EVER = timedelta(days=1000)  # hvdkit's waits check the other ranks themselves, and a slow rank has not failed
_LOOK = timedelta(milliseconds=100)

_TOGETHER_BYTES = 64 * 1024  # up to here one exchange of equal slices gathers; above, broadcasts, with fewer copies

#: The dtypes that Gloo may add up; it would round 16-bit floats after every addition.
_REDUCIBLE = frozenset({"uint8", "int8", "int32", "int64", "bool", "float32", "float64"})

Explain = Callable[[str, Exception], Exception]


@functools.cache
def load_gloo() -> Any:
    """Return torch.distributed. Raises MissingDependencyError if torch is not installed, or has no Gloo."""
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
    """Return whether a torch with Gloo is installed; loads torch."""
    try:
        load_gloo()
    except ImportError:
        return False
    return True


def host_store() -> Any:
    """Make a store of torch's, which this process serves."""
    return _open_store("127.0.0.1", 0, _STORE, is_master=True)


def host_store_at(address: str, port: int) -> Any:
    """Make a store at a given port, which this process serves; the script may make its own groups through it too."""
    return _open_store(address, port, _STORE, is_master=True, multi_tenant=True)


def join_store(address: str, port: int, timeout_s: float, deadline: float = 0.0, owner: str = "Rank 0") -> Any:
    """Connect to a store that another process serves.

    address: host name or IP address.
    port: TCP port.
    timeout_s: timeout of the connection, in seconds.
    deadline: for its first answer, on the clock of time.monotonic(); the connection's timeout if that is later.
    owner: the process that serves it, for messages.
    Raises TransportError.
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
    except RuntimeError as error:  # torch's DistNetworkError and similar errors
        raise TransportError(f"torch's TCPStore at {address}:{port} cannot be opened: {error}") from error


class GlooWire:
    """See Wire: a separate process group of Gloo. All its ranks make it together, with the same name.

    store: the store through which the ranks connect.
    name: the group's name in the store.
    rank: this process's number in the group.
    size: number of ranks.
    address: the address of this host that the other ranks can reach.
    explain: makes the error of a call that has failed.
    """

    largest_count = sys.maxsize
    messages: Messages | None = None  # Gloo's own messages cannot be polled

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
        """Fill each slice of `out` with that of its root, by broadcasts that run at once. pieces: (root, slice)."""
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
        """See Wire.close. The wire itself knows whether it is idle."""
        if any(not request.over for request in self._open):
            # Its destructor would wait for collectives in progress, which cannot end if the other ranks have ended.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None
        self._open = []

    def release(self, *, idle: bool) -> None:
        """See Wire.release. No other wire uses its connections."""
        self.close(idle=idle)


#: The open wires.
_wires: weakref.WeakSet[GlooWire] = weakref.WeakSet()


@atexit.register
def _close_wires() -> None:
    """End Gloo's threads before Python ends: a thread that uses Python later kills the process by SIGABRT."""
    for wire in list(_wires):
        wire.close()


class GlooRequest(Request):
    """See Request.

    what: the name of the collective, for messages.
    works: torch's objects of the parts of the collective.
    out: see Request.
    memory: objects that Gloo reads and writes until it is done, which must stay alive.
    explain: see GlooWire.
    """

    def __init__(self, what: str, works: Sequence[Any], out: Buffer, memory: object, explain: Explain) -> None:
        self.out = out
        self._what, self._works, self._memory, self._explain = what, works, memory, explain

    @property
    def over(self) -> bool:
        """Return whether it is done or has failed."""
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
        """See Request.wait. The thread sleeps in Gloo, unless drive() has registered functions for it."""
        if drives():
            return super().wait()
        try:
            for work in self._works:
                while not work.is_completed():
                    with contextlib.suppress(RuntimeError):  # a timeout, or a failure, which done() raises
                        work.wait(_LOOK)
                        continue
                    check_wait()
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
