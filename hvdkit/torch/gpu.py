"""Queries of torch about GPUs (device, current stream), and allocation of GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from hvdkit.config import Config
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.cuda import open_device
from hvdkit.transport.device import Event
from hvdkit.transport.nccl.groups import DeviceSettings

#: Whether a tensor is in host memory. Called for every tensor: a Python function would take ten times as long.
is_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")


def is_cuda_build() -> bool:
    """Return whether this torch was built for CUDA; all ranks of a job have the same build."""
    return torch.version.cuda is not None


def common_gpu(tensors: Iterable[torch.Tensor]) -> int | None:
    """Return the index, in this process, of the GPU that holds all tensors; None if they are not on one GPU."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return None
    device = devices.pop()
    return device.index if device.type == "cuda" else None


def current_gpu() -> int:
    """Return the index, in this process, of the current GPU of the calling thread."""
    return torch.cuda.current_device()


def device(index: int) -> torch.device:
    """Return torch's device for GPU `index` of this process."""
    return torch.device("cuda", index)


def current_stream(index: int) -> int:
    """Return the calling thread's current stream on the GPU, as CUDA's handle.

    Raises HorovodInternalError while the stream is captured in a CUDA graph.
    """
    stream = torch.cuda.current_stream(index)
    if torch.cuda.is_current_stream_capturing():
        raise HorovodInternalError(
            "Gradients or other tensors were to be exchanged while a CUDA graph is being captured. A graph would "
            "repeat this rank's part without hvdkit's checks that all ranks take part. Capture forward and backward "
            "of a model that is not wrapped, and call optimizer.synchronize() after the graph has been replayed; call "
            "collectives outside of the graph."
        )
    return int(stream.cuda_stream)


def make_allocate(index: int) -> Callable[[int, str], Buffer]:
    """Return a function that allocates memory of GPU `index` as a tensor (n,) of zeros."""

    def allocate(count: int, dtype: str) -> Buffer:
        return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype], device=torch.device("cuda", index)), dtype)

    return allocate


@torch.no_grad()
def scale(buffer: Buffer, factor: float) -> None:
    """Multiply a TensorBuffer in place, on the current stream."""
    assert isinstance(buffer, TensorBuffer)
    buffer.array.mul_(factor)


def record_event(index: int) -> Event:
    """Record an event after the calling thread's work on its current stream of GPU `index`.

    Raises what current_stream() raises, and CudaError.
    """
    event = open_device(index).make_event()
    event.record(current_stream(index))
    return event


def make_on_stream(count: int, dtype: torch.dtype, value: float | None, index: int, stream: int) -> torch.Tensor:
    """Allocate memory (count,) on GPU `index` from the pool of a stream that no framework owns.

    value: written to it in the order of the stream; None leaves the memory unset.
    stream: CUDA's handle.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, index)):
        if value is None:
            return torch.empty(count, dtype=dtype, device=device(index))
        return torch.full((count,), value, dtype=dtype, device=device(index))


def record_use(tensors: Iterable[torch.Tensor], index: int) -> None:
    """Delay reuse of the tensors' memory until the work now on the current stream of GPU `index` has run."""
    stream = torch.cuda.current_stream(index)
    for tensor in tensors:
        tensor.record_stream(stream)


def device_settings(config: Config) -> DeviceSettings:
    """Return the user's configuration for reductions in GPU memory."""
    return DeviceSettings(config.device_transport, config.nccl_library, config.share_gpus)
