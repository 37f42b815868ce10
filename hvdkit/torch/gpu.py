"""What hvdkit asks torch of a GPU: which one, the stream that is given work to, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hvdkit.config import Config
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.nccl.groups import DeviceSettings


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


def current_stream(index: int) -> int:
    """The stream of the GPU that the calling thread gives work to, as CUDA's handle.

    Raises HorovodInternalError while it is captured in a CUDA graph.
    """
    stream = torch.cuda.current_stream(index)
    if torch.cuda.is_current_stream_capturing():
        raise HorovodInternalError(
            "Gradients were to be reduced while a CUDA graph is being captured. A graph would repeat the reduction of "
            "this rank without hvdkit's checks that all ranks take part. Capture forward and backward of a model that "
            "is not wrapped, and call optimizer.synchronize() after the graph has been replayed."
        )
    return int(stream.cuda_stream)


def make_allocate(index: int) -> Callable[[int, str], Buffer]:
    """Makes memory of GPU `index`, as a tensor (n,) of zeros."""

    def allocate(count: int, dtype: str) -> Buffer:
        return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype], device=torch.device("cuda", index)), dtype)

    return allocate


def device_settings(config: Config) -> DeviceSettings:
    """How memory of GPUs is reduced, in the user's configuration."""
    return DeviceSettings(config.device_transport, config.nccl_library, config.share_gpus)
