"""What hvdkit asks torch of a GPU: which one, the stream that is given work to, and memory."""

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

#: Is a tensor in the memory of the host? Asked for every tensor: a call of Python would take ten times as long.
is_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")


def is_cuda_build() -> bool:
    """Was this torch built for CUDA? All ranks of a job have the same build."""
    return torch.version.cuda is not None


def common_gpu(tensors: Iterable[torch.Tensor]) -> int | None:
    """The number of the GPU, among those that this process sees, that all of the tensors are on; None otherwise."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return None
    device = devices.pop()
    return device.index if device.type == "cuda" else None


def current_gpu() -> int:
    """The number of the GPU that the calling thread works with, among those that this process sees."""
    return torch.cuda.current_device()


def device(index: int) -> torch.device:
    """GPU `index` of this process, as torch calls it."""
    return torch.device("cuda", index)


def current_stream(index: int) -> int:
    """The stream of the GPU that the calling thread gives work to, as CUDA's handle.

    Raises HorovodInternalError while it is captured in a CUDA graph.
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
    """Makes memory of GPU `index`, as a tensor (n,) of zeros."""

    def allocate(count: int, dtype: str) -> Buffer:
        return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype], device=torch.device("cuda", index)), dtype)

    return allocate


@torch.no_grad()
def scale(buffer: Buffer, factor: float) -> None:
    """Multiply a TensorBuffer in place, on the current stream."""
    assert isinstance(buffer, TensorBuffer)
    buffer.array.mul_(factor)


def record_event(index: int) -> Event:
    """An event after what the calling thread has given to its current stream of GPU `index`.

    Raises what current_stream() raises, and CudaError.
    """
    event = open_device(index).make_event()
    event.record(current_stream(index))
    return event


def make_on_stream(count: int, dtype: torch.dtype, value: float | None, index: int, stream: int) -> torch.Tensor:
    """New memory (count,) of GPU `index`, of the pool of a stream that is no framework's: CUDA's handle of it.

    value: written there in the order of that stream; None leaves the memory as it is.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, index)):
        if value is None:
            return torch.empty(count, dtype=dtype, device=device(index))
        return torch.full((count,), value, dtype=dtype, device=device(index))


def record_use(tensors: Iterable[torch.Tensor], index: int) -> None:
    """Have the tensors' memory used again only after what the current stream of GPU `index` has been given by then."""
    stream = torch.cuda.current_stream(index)
    for tensor in tensors:
        tensor.record_stream(stream)


def device_settings(config: Config) -> DeviceSettings:
    """How memory of GPUs is reduced, in the user's configuration."""
    return DeviceSettings(config.device_transport, config.nccl_library, config.share_gpus)
