"""Queries of TensorFlow about GPUs (device, addresses of tensors), and memory for results."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.tracing import in_session
from hvdkit.transport.dlpack import GPU_TYPES, read_capsule


@functools.cache
def platform() -> str:
    """Return what this TensorFlow was built for, "cuda" or "rocm"; "" for CPUs. All ranks have the same build."""
    if tf.test.is_built_with_rocm():
        return "rocm"
    return "cuda" if tf.test.is_built_with_cuda() else ""


def gpu_for(variables: Iterable[Any]) -> str | None:
    """Return TensorFlow's name of the GPU that may reduce gradients of these variables; None for host memory."""
    return common_gpu(variables) if platform() and not in_session() else None


def common_gpu(variables: Iterable[Any]) -> str | None:
    """Return TensorFlow's name ("GPU:0") of the GPU with all variables; None if they are not on one GPU.

    variables: of TensorFlow or Keras, or tensors; tensors of a graph have no device yet.
    """
    names = {_device_of(variable) for variable in variables}
    device = tf.DeviceSpec.from_string(names.pop() if len(names) == 1 else "")
    return f"GPU:{device.device_index}" if device.device_type == "GPU" else None


def _device_of(variable: Any) -> str:
    own = variable if hasattr(variable, "device") else variable.value  # of a Keras variable
    return str(own.device or "")


def device_index(device: str) -> int:
    """Return the number for CUDA or HIP, in this process, of one of TensorFlow's GPUs ("GPU:0").

    TensorFlow counts the devices after tf.config.set_visible_devices(), and each part of a divided GPU.
    """
    shown = [
        physical
        for physical in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(physical) or [None]
    ]
    return int(shown[int(device.rpartition(":")[2])].name.rpartition(":")[2])


def address_of(tensor: Any) -> int:
    """Return the address of an eager tensor in GPU memory, valid as long as the tensor exists.

    The calling thread waits until the GPU has done all of TensorFlow's work. Raises HorovodInternalError
    for a tensor that is not on a GPU.
    """
    address, memory = read_capsule(tf.experimental.dlpack.to_dlpack(tensor))
    if memory != GPU_TYPES.get(platform()):
        raise HorovodInternalError(
            f"A gradient of shape {tuple(tensor.shape)} and {tensor.dtype.name} is on {tensor.device}, but its "
            "variable is on a GPU. Set HVDKIT_DEVICE_TRANSPORT=host to have gradients go through the host's memory."
        )
    return address


def empty_like(tensor: Any) -> Any:
    """Allocate an eager tensor on the current device with another's shape and dtype; its values are arbitrary."""
    return tf.raw_ops.Empty(shape=tensor.shape.as_list(), dtype=tensor.dtype, init=False)
