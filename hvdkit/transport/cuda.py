"""CUDA's driver: see gpu_driver.py. It uses a device's primary context, as frameworks do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_uint, c_void_p

from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.gpu_driver import Driver, GpuDevice, Uuid

#: All return a CUresult.
CUDA = CLibrary(
    name="CUDA's driver",
    files=("libcuda.so.1",),
    functions={
        "init": ("cuInit", (c_uint,)),
        "driver_version": ("cuDriverGetVersion", (POINTER(c_int),)),
        "device_count": ("cuDeviceGetCount", (POINTER(c_int),)),
        "device": ("cuDeviceGet", (POINTER(c_int), c_int)),
        "uuid": ("cuDeviceGetUuid_v2", (POINTER(Uuid), c_int)),
        "retain_context": ("cuDevicePrimaryCtxRetain", (POINTER(c_void_p), c_int)),
        "push_context": ("cuCtxPushCurrent_v2", (c_void_p,)),
        "pop_context": ("cuCtxPopCurrent_v2", (POINTER(c_void_p),)),
        "priority_range": ("cuCtxGetStreamPriorityRange", (POINTER(c_int), POINTER(c_int))),
        "create_stream": ("cuStreamCreateWithPriority", (POINTER(c_void_p), c_uint, c_int)),
        "destroy_stream": ("cuStreamDestroy_v2", (c_void_p,)),
        "wait_event": ("cuStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
        "create_event": ("cuEventCreate", (POINTER(c_void_p), c_uint)),
        "destroy_event": ("cuEventDestroy_v2", (c_void_p,)),
        "record_event": ("cuEventRecord", (c_void_p, c_void_p)),
        "query_event": ("cuEventQuery", (c_void_p,)),
        "synchronize_event": ("cuEventSynchronize", (c_void_p,)),
        "elapsed_time": ("cuEventElapsedTime", (POINTER(c_float), c_void_p, c_void_p)),
        "exchange_capture_mode": ("cuThreadExchangeStreamCaptureMode", (POINTER(c_int),)),
        "error_string": ("cuGetErrorString", (c_int, POINTER(c_char_p))),
    },
    cure="It comes with the NVIDIA driver of the machine, not from pip; nvidia-smi shows whether there is one.",
)


class CudaDriver(Driver):
    """See Driver. version: the newest CUDA that the driver can run."""

    library = CUDA
    result_type = "CUresult"
    visible = "CUDA_VISIBLE_DEVICES"

    @staticmethod
    def decode_version(code: int) -> tuple[int, int]:
        return code // 1000, code % 1000 // 10

    def open_gpu(self, index: int, where: str) -> tuple[str, c_void_p]:
        """See Driver.open_gpu. Returns the UUID of the GPU or MIG instance, and its context."""
        device, identity, context = c_int(), Uuid(), c_void_p()
        self.call("device", device, index, where=where)
        self.call("uuid", identity, device, where=where)
        self.call("retain_context", context, device, where=where)
        return bytes(identity).hex(), context

    @contextlib.contextmanager
    def current(self, opened: c_void_p, where: str) -> Iterator[None]:
        self.call("push_context", opened, where=where)
        try:
            yield
        finally:
            self.call("pop_context", c_void_p(), where=where)


@functools.cache
def load_driver(path: str = "", kind: type[Driver] = CudaDriver) -> Driver:
    """Open a driver, once. path: its file; "" to find it. Raises MissingDependencyError or DriverError."""
    return kind(path)


@functools.cache
def open_device(index: int, kind: type[Driver] = CudaDriver) -> GpuDevice:
    """Open GPU `index`, once. Raises as load_driver() and GpuDevice() do."""
    return GpuDevice(load_driver("", kind), index)
