"""Queries of JAX about GPUs: device index, addresses of arrays, and the stream of programs."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import jax
import keras

from hvdkit.config import Config
from hvdkit.transport.nccl.groups import DeviceSettings


def is_cuda_build() -> bool:
    """Return whether JAX's CUDA plugin is installed; all ranks of a job have the same installation."""
    try:
        plugins = importlib.import_module("jax_plugins")
    except ImportError:
        return False
    return any(plugin.name.startswith("xla_cuda") for plugin in pkgutil.iter_modules(plugins.__path__))


def common_gpu() -> int | None:
    """Return the index, in this process, of the GPU that programs run on; None for no GPU or several."""
    if jax.default_backend() != "gpu" or keras.distribution.distribution() is not None:
        return None
    device = getattr(jax.config, "jax_default_device", None)  # a Device or the name of a platform
    if not isinstance(device, jax.Device):
        device = jax.local_devices()[0]
    return int(device.local_hardware_id) if device.platform == "gpu" else None


def address_of(buffer: Any) -> int:
    """Return the address of an array that XLA has passed to a callback on a GPU."""
    return int(buffer.__cuda_array_interface__["data"][0])


def stream_of(context: Any) -> int:
    """Return XLA's stream of the callback, as CUDA's handle."""
    return int(context.stream)


def index_of(buffer: Any) -> int:
    """Return the index of the array's GPU."""
    return int(buffer.__dlpack_device__()[1])


def device_settings(config: Config) -> DeviceSettings:
    """Return the user's configuration for reductions in GPU memory."""
    return DeviceSettings(config.device_transport, config.nccl_library, config.share_gpus)
