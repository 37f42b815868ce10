"""Queries of JAX about GPUs: device index, addresses of arrays, and the stream of programs."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import jax
import keras

from hvdkit.config import Config
from hvdkit.transport.dlpack import GPU_TYPES, read_capsule
from hvdkit.transport.nccl.groups import DeviceSettings


def is_gpu_build() -> bool:
    """Return whether JAX's plugin for CUDA or ROCm is installed; all ranks of a job have the same installation."""
    try:
        plugins = importlib.import_module("jax_plugins")
    except ImportError:
        return False
    names = [plugin.name for plugin in pkgutil.iter_modules(plugins.__path__)]
    return any(name.startswith(("xla_cuda", "xla_rocm")) for name in names)


def platform() -> str:
    """Return "rocm" if the GPU that programs run on is one of ROCm, else "cuda"."""
    return "rocm" if "rocm" in _default_device().client.platform_version else "cuda"


def common_gpu() -> int | None:
    """Return the index, in this process, of the GPU that programs run on; None for no GPU or several."""
    if jax.default_backend() != "gpu" or keras.distribution.distribution() is not None:
        return None
    device = _default_device()
    return int(device.local_hardware_id) if device.platform == "gpu" else None


def _default_device() -> Any:
    device = getattr(jax.config, "jax_default_device", None)  # a Device or the name of a platform
    return device if isinstance(device, jax.Device) else jax.local_devices()[0]


def address_of(buffer: Any) -> int:
    """Return the address of an array that XLA has passed to a callback on a GPU."""
    if buffer.__dlpack_device__()[0] != GPU_TYPES["rocm"]:
        return int(buffer.__cuda_array_interface__["data"][0])
    address, _ = read_capsule(buffer.__dlpack__())  # on ROCm some JAX do not have the other interface
    return address


def stream_of(context: Any) -> int:
    """Return XLA's stream of the callback, as the handle of CUDA or HIP."""
    return int(context.stream)


def index_of(buffer: Any) -> int:
    """Return the index of the array's GPU."""
    return int(buffer.__dlpack_device__()[1])


def device_settings(config: Config) -> DeviceSettings:
    """Return the user's configuration for reductions in GPU memory."""
    wish, sums = config.device_transport, config.device_sums
    return DeviceSettings(wish, config.nccl_library, config.share_gpus, platform(), sums)
