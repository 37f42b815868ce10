"""HIP, the runtime of AMD's GPUs: see gpu_driver.py. Never run on an AMD GPU; read from HIP's headers and source.

Each thread has a current device. HIP's functions of contexts are deprecated, and select that device too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_uint, c_void_p, create_string_buffer

from hvdkit.errors import MissingDependencyError
from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.gpu_driver import Driver, Uuid

#: How to have a library of ROCm found.
ROCM_CURE = (
    "It comes with ROCm 6.0 or later, in /opt/rocm/lib as a rule: load your site's module for ROCm, or add this folder "
    "to LD_LIBRARY_PATH."
)

#: All return a hipError_t.
HIP = CLibrary(
    name="HIP",
    files=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    functions={
        "init": ("hipInit", (c_uint,)),
        "driver_version": ("hipDriverGetVersion", (POINTER(c_int),)),
        "device_count": ("hipGetDeviceCount", (POINTER(c_int),)),
        "uuid": ("hipDeviceGetUuid", (POINTER(Uuid), c_int)),
        "bus_id": ("hipDeviceGetPCIBusId", (c_char_p, c_int, c_int)),
        "get_device": ("hipGetDevice", (POINTER(c_int),)),
        "set_device": ("hipSetDevice", (c_int,)),
        "priority_range": ("hipDeviceGetStreamPriorityRange", (POINTER(c_int), POINTER(c_int))),
        "create_stream": ("hipStreamCreateWithPriority", (POINTER(c_void_p), c_uint, c_int)),
        "destroy_stream": ("hipStreamDestroy", (c_void_p,)),
        "wait_event": ("hipStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
        "create_event": ("hipEventCreateWithFlags", (POINTER(c_void_p), c_uint)),
        "destroy_event": ("hipEventDestroy", (c_void_p,)),
        "record_event": ("hipEventRecord", (c_void_p, c_void_p)),
        "query_event": ("hipEventQuery", (c_void_p,)),
        "synchronize_event": ("hipEventSynchronize", (c_void_p,)),
        "elapsed_time": ("hipEventElapsedTime", (POINTER(c_float), c_void_p, c_void_p)),
        "exchange_capture_mode": ("hipThreadExchangeStreamCaptureMode", (POINTER(c_int),)),
        "error_string": ("hipDrvGetErrorString", (c_int, POINTER(c_char_p))),
    },
    cure=ROCM_CURE,
)
_NO_UUID = b"XX"  # of "GPU-XX", ROCm's UUID of every GPU without one; HIP omits "GPU-"


class HipDriver(Driver):
    """See Driver. version: of HIP, which is that of ROCm."""

    library = HIP
    result_type = "hipError_t"
    visible = "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES"

    @classmethod
    def find(cls) -> str:
        """Return the file that the framework has loaded: streams and addresses are those of one copy of HIP.

        Raises MissingDependencyError if this process has loaded several.
        """
        found = HIP.mapped()
        if len(found) > 1:
            raise MissingDependencyError(
                f"This process has loaded several copies of HIP: {', '.join(found)}. A GPU's streams belong to one of "
                "them, and which one is not known. Import one framework only, or set HVDKIT_DEVICE_TRANSPORT=host."
            )
        return found[0] if found else ""

    @staticmethod
    def decode_version(code: int) -> tuple[int, int]:
        return code // 10_000_000, code // 100_000 % 100

    def open_gpu(self, index: int, where: str) -> tuple[str, int]:
        """See Driver.open_gpu. The identity is UUID, or host, and PCI address, by which RCCL finds ranks on one GPU."""
        identity, address = Uuid(), create_string_buffer(32)
        self.call("uuid", identity, index, where=where)
        self.call("bus_id", address, len(address), index, where=where)
        known = not bytes(identity).startswith(_NO_UUID)
        return f"{bytes(identity).hex() if known else socket.gethostname()} at {address.value.decode()}", index

    @contextlib.contextmanager
    def current(self, opened: int, where: str) -> Iterator[None]:
        before = c_int()
        self.call("get_device", before, where=where)
        self.call("set_device", opened, where=where)
        try:
            yield
        finally:
            self.call("set_device", before, where=where)
