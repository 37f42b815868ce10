"""Reads DLPack's capsules: the address and the device of a framework's tensor."""

from __future__ import annotations

import ctypes

#: What a framework is built for -> DLPack's type of a GPU's memory: kDLCUDA, kDLROCM.
GPU_TYPES = {"cuda": 2, "rocm": 10}


class _Tensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor, including that of its DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def read_capsule(capsule: object) -> tuple[int, int]:
    """Return the address of the memory, valid as long as its tensor exists, and DLPack's type of the memory.

    capsule: with a DLManagedTensor, without a version; nobody has used it before.
    """
    read = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    return int(read.data or 0), int(read.device_type)
