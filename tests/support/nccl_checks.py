"""What ranks do with a communicator of NCCL over the stand-in: each body gets a transport, by which the ranks meet."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stand_in import ask_to_fail, load_collectives, open_stand_in, platform, stand_in_path, synchronizations

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import as_buffer
from hvdkit.transport.gpu_driver import GpuDevice
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.groups import watch
from hvdkit.transport.nccl.library import OPERATIONS, REDUCIBLE, NcclError

_NUMPY = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


def _broadcast(transport: Transport) -> Callable[[bytes], bytes]:
    def broadcast(identity: bytes) -> bytes:
        array = np.frombuffer(identity, np.uint8).copy()
        transport.broadcast(as_buffer(array), 0)
        return array.tobytes()

    return broadcast


def connect(transport: Transport, timeout_s: float = 20.0) -> Communicator:
    """The ranks of `transport`, as NCCL's."""
    where = f"rank {transport.rank} on {socket.gethostname()}, GPU 0"
    library = load_collectives()
    return Communicator(library, transport.rank, transport.size, _broadcast(transport), where, lambda: None, timeout_s)


def connect_group(transport: Transport) -> DeviceGroup:
    """The ranks of `transport`, each with the stand-in's GPU, looked after by a thread."""
    where = f"rank {transport.rank} on {socket.gethostname()}, GPU 0"
    group = DeviceGroup(transport, open_stand_in(), load_collectives(), where, 20.0)
    watch(group)
    return group


@contextmanager
def stream_of(device: GpuDevice) -> Iterator[int]:
    """A stream of high priority."""
    stream = device.make_stream(high_priority=True)
    yield stream
    device.destroy_stream(stream)


def _finish(device: GpuDevice, stream: int) -> None:
    event = device.make_event()
    event.record(stream)
    while not event.done():
        time.sleep(0.0005)


def _values(rank: int, count: int, dtype: str) -> NDArray[Any]:
    return ((np.arange(count) * 7 + rank * 3) % 5 + 1).astype(dtype)


def collectives(transport: Transport) -> None:
    """Every collective, with every dtype and operation, at once on one stream and without a wait of the host."""
    device, communicator = open_stand_in(), connect(transport)
    before, rank, size, checks = synchronizations(), transport.rank, transport.size, []
    with stream_of(device) as stream:
        dtypes = [dtype for dtype in REDUCIBLE if dtype != "bfloat16"]
        for (dtype, op), count in zip(
            itertools.product(dtypes, _NUMPY), itertools.cycle((1, 7, 100_003)), strict=False
        ):
            own = [_values(one, count, dtype) for one in range(size)]
            total = own[0].copy()
            for other in own[1:]:
                total = _NUMPY[op](total, other)
            target = np.zeros(count, dtype)
            communicator.all_reduce(
                own[rank].ctypes.data, target.ctypes.data, count, REDUCIBLE[dtype], OPERATIONS[op], stream
            )
            checks.append((own, target, total))
        whole = [_values(one, 11 * size, "float32") for one in range(size)]
        part, mean = np.zeros(11, "float32"), np.mean(whole, axis=0)[11 * rank : 11 * rank + 11]
        code = REDUCIBLE["float32"]
        communicator.reduce_scatter(whole[rank].ctypes.data, part.ctypes.data, 11, code, OPERATIONS["average"], stream)
        gathered = np.zeros(11 * size * size, "float32")
        communicator.all_gather(whole[rank].ctypes.data, gathered.ctypes.data, 11 * size, code, stream)
        given = np.full(5, rank, "float64")
        communicator.broadcast(given.ctypes.data, given.ctypes.data, given.nbytes, size - 1, stream)
        _finish(device, stream)
    assert synchronizations() == before
    for _, target, total in checks:
        np.testing.assert_array_equal(target, total)
    np.testing.assert_allclose(part, mean, rtol=1e-6)
    np.testing.assert_array_equal(gathered, np.concatenate(whole))
    np.testing.assert_array_equal(given, np.full(5, size - 1))
    communicator.close()
    communicator.close()


def messages(transport: Transport) -> None:
    """Pieces of any size to every rank at once, and some that are larger than what a wire holds."""
    device, communicator = open_stand_in(), connect(transport)
    rank, size = transport.rank, transport.size
    with stream_of(device) as stream:
        pieces = [np.full(10 * rank + to, 100 * rank + to, "int32") for to in range(size)]
        places = [np.zeros(10 * source + rank, "int32") for source in range(size)]
        communicator.all_to_all(
            [(one.ctypes.data, one.nbytes) for one in pieces], [(one.ctypes.data, one.nbytes) for one in places], stream
        )
        sent, received = np.full(300_000, rank, "float64"), np.zeros(300_000)
        sources, targets = [(sent.ctypes.data, 0)] * size, [(received.ctypes.data, 0)] * size
        sources[(rank + 1) % size] = sent.ctypes.data, sent.nbytes
        targets[(rank - 1) % size] = received.ctypes.data, received.nbytes
        communicator.all_to_all(sources, targets, stream)
        _finish(device, stream)
    for source, place in enumerate(places):
        assert (place == 100 * source + rank).all()
    assert (received == (rank - 1) % size).all()
    communicator.close()


def _copy(target: Any, source: Any, stream: int) -> None:
    """Enqueue a copy of device memory, as a framework does."""
    addresses = (ctypes.c_uint64(array.ctypes.data) for array in (target, source))
    library = ctypes.CDLL(stand_in_path())
    copy = library.hipMemcpyDtoDAsync if platform() == "rocm" else library.cuMemcpyDtoDAsync_v2
    assert copy(*addresses, ctypes.c_size_t(target.nbytes), ctypes.c_void_p(stream)) == 0


def order(transport: Transport) -> None:
    """Gradients that are still being computed are waited for by the stream, and the result by whoever uses it."""
    device, communicator = open_stand_in(), connect(transport)
    code, ready, reduced = REDUCIBLE["float32"], device.make_event(), device.make_event()
    with stream_of(device) as computing, stream_of(device) as reducing:
        for turn in range(20):
            fresh = np.full(1000, turn + transport.rank, "float32")
            bucket, gradient = np.full(1000, np.nan, "float32"), np.full(1000, np.nan, "float32")
            _copy(bucket, fresh, computing)
            ready.record(computing)
            device.wait(reducing, ready)
            communicator.all_reduce(bucket.ctypes.data, bucket.ctypes.data, 1000, code, OPERATIONS["sum"], reducing)
            reduced.record(reducing)
            device.wait(computing, reduced)
            _copy(gradient, bucket, computing)
            _finish(device, computing)
            assert (gradient == sum(range(transport.size)) + turn * transport.size).all()
    communicator.close()


def a_rank_dies(transport: Transport) -> bool:
    """The last rank is killed inside of an allreduce; the others hear of it and end the operation."""
    device, communicator = open_stand_in(), connect(transport)
    numbers = np.full(1000, 1.0 + transport.rank, "float32")
    code, total = REDUCIBLE["float32"], OPERATIONS["sum"]
    with stream_of(device) as stream:
        if transport.rank == transport.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.all_reduce(numbers.ctypes.data, numbers.ctypes.data, 1000, code, total, stream)
        try:
            while True:
                communicator.check()
                time.sleep(0.005)
        except NcclError as error:
            assert f"rank {transport.rank} on {socket.gethostname()}, GPU 0" in str(error)
            assert "remote" in str(error)
        communicator.abort()
        _finish(device, stream)
    return True


def failures(transport: Transport) -> list[str]:
    """The messages of calls that fail, one that others do not make, and one on a communicator that is closed."""
    communicator = connect(transport)
    ask_to_fail("ncclAllReduce", 1)
    with pytest.raises(NcclError) as reducing:
        communicator.all_reduce(0, 0, 0, 0, 0, 0)
    communicator.close()
    with pytest.raises(TransportError) as closed:
        communicator.all_reduce(0, 0, 0, 0, 0, 0)
    if transport.rank == 0:
        ask_to_fail("ncclCommInitRankConfig", 5)
    with pytest.raises(TransportError) as connecting:
        connect(transport, timeout_s=0.3)
    return [str(caught.value) for caught in (reducing, closed, connecting)]


def a_group_fails(transport: Transport) -> list[str]:
    """What a group says when CUDA fails as a stream is to wait for NCCL, and after that."""
    group = connect_group(transport)
    ready, done = group.device.make_event(), group.device.make_event()

    def run() -> None:
        group.run(lambda *_: None, 0, ready, done)

    def join() -> None:
        group.join(0, done)

    said = []
    run()
    ask_to_fail("hipStreamWaitEvent" if platform() == "rocm" else "cuStreamWaitEvent", 700)
    for call in (join, run, group.check):
        with pytest.raises(TransportError) as failed:
            call()
        said.append(str(failed.value))
    group.close()
    return said
