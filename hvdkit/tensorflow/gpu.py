"""Queries of TensorFlow about GPUs (device, addresses of tensors), and memory for results."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.tracing import in_session

#: DLPack's device type of CUDA memory.
DLPACK_CUDA = 2


def is_cuda_build() -> bool:
    """Return whether this TensorFlow was built for CUDA; all ranks of a job have the same build."""
    return bool(tf.test.is_built_with_cuda())


def gpu_for(variables: Iterable[Any]) -> str | None:
    """Return TensorFlow's name of the GPU that may reduce gradients of these variables; None for host memory."""
    return common_gpu(variables) if is_cuda_build() and not in_session() else None


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


def cuda_index(device: str) -> int:
    """Return the CUDA index, in this process, of one of TensorFlow's GPUs ("GPU:0").

    TensorFlow counts the devices after tf.config.set_visible_devices(), and each part of a divided GPU.
    """
    shown = [
        physical
        for physical in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(physical) or [None]
    ]
    return int(shown[int(device.rpartition(":")[2])].name.rpartition(":")[2])


class _DlTensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor, including that of its DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


_read_capsule = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def address_of(tensor: Any) -> int:
    """Return the address of an eager tensor in GPU memory, valid as long as the tensor exists.

    The calling thread waits until the GPU has done all of TensorFlow's work. Raises HorovodInternalError
    for a tensor that is not on a GPU.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    read = _DlTensor.from_address(_read_capsule(capsule, b"dltensor"))
    if read.device_type != DLPACK_CUDA:
        raise HorovodInternalError(
            f"A gradient of shape {tuple(tensor.shape)} and {tensor.dtype.name} is on {tensor.device}, but its "
            "variable is on a GPU. Set HVDKIT_DEVICE_TRANSPORT=host to have gradients go through the host's memory."
        )
    return int(read.data or 0)


def empty_like(tensor: Any) -> Any:
    """Allocate an eager tensor on the current device with another's shape and dtype; its values are arbitrary."""
    return tf.raw_ops.Empty(shape=tensor.shape.as_list(), dtype=tensor.dtype, init=False)
