"""A CUDA device through the driver's C interface, by ctypes, independent of the framework.

It uses the device's primary context, as frameworks do. Their streams are passed as handles, such as
torch.cuda.current_stream().cuda_stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_ubyte, c_uint, c_void_p

from hvdkit.errors import MissingDependencyError, TransportError
from hvdkit.transport.device import Device, Event

_SUCCESS = 0
_OUT_OF_MEMORY = 2
_NOT_READY = 600
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_Uuid = c_ubyte * 16
#: Function -> its parameters' types. All return a CUresult.
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaError(TransportError):
    """A call of CUDA's driver has failed. result: the CUresult that it returned."""

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result


class Driver:
    """An opened libcuda. version: the newest CUDA that it can run, as (major, minor)."""

    def __init__(self, path: str) -> None:
        """Open the driver. Raises MissingDependencyError if it is missing, CudaError if it does not start."""
        try:
            library = ctypes.CDLL(path)
            self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise MissingDependencyError(
                f"CUDA's driver cannot be loaded from {path}: {error}. It comes with the NVIDIA driver of the machine, "
                "not from pip; nvidia-smi shows whether there is one."
            ) from error
        for name, types in _FUNCTIONS.items():
            self._functions[name].argtypes, self._functions[name].restype = types, c_int
        self.call("cuInit", 0)
        code = c_int()
        self.call("cuDriverGetVersion", code)
        self.version = (code.value // 1000, code.value % 1000 // 10)

    def call(self, function: str, *arguments: object, where: str = "") -> None:
        """Call a function of the driver. where: the GPU, for the message. Raises CudaError."""
        if (result := self._functions[function](*arguments)) != _SUCCESS:
            raise self.error(function, result, where)

    def ready(self, event: c_void_p, where: str) -> bool:
        """Return whether an event is done, by cuEventQuery. Raises CudaError."""
        result: int = self._functions["cuEventQuery"](event)
        if result not in (_SUCCESS, _NOT_READY):
            raise self.error("cuEventQuery", result, where)
        return result == _SUCCESS

    def error(self, function: str, result: int, where: str = "") -> CudaError:
        """Make the error of a call that returned `result`."""
        text = c_char_p()
        self._functions["cuGetErrorString"](result, text)
        words = (text.value or b"unknown error").decode(errors="replace")
        cure = " Use a smaller batch or bucket, or fewer ranks on the GPU." if result == _OUT_OF_MEMORY else ""
        return CudaError(
            f"{function} failed{f' on {where}' if where else ''}: {words} (CUresult {result}).{cure}", result
        )


@functools.cache
def load_driver(path: str = "libcuda.so.1") -> Driver:
    """Open CUDA's driver, once. Raises MissingDependencyError or CudaError."""
    return Driver(path)


class CudaDevice(Device):
    """See Device: GPU `index` of those that this process sees. uuid: of the GPU or MIG instance, as hex."""

    def __init__(self, driver: Driver, index: int) -> None:
        """Open the GPU. Raises TransportError if this process sees fewer GPUs, CudaError if the driver fails."""
        self.driver, self.index = driver, index
        self.where = f"GPU {index}"
        count = c_int()
        driver.call("cuDeviceGetCount", count)
        if not 0 <= index < count.value:
            raise TransportError(
                f"There is no GPU {index}: this process sees {count.value}. Start one rank a GPU (hvdrun -np gpu), or "
                "look at CUDA_VISIBLE_DEVICES."
            )
        self._device = c_int()
        driver.call("cuDeviceGet", self._device, index, where=self.where)
        identity = _Uuid()
        driver.call("cuDeviceGetUuid_v2", identity, self._device, where=self.where)
        self.uuid = bytes(identity).hex()
        self._context = c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", self._context, self._device, where=self.where)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.driver.call("cuCtxPushCurrent_v2", self._context, where=self.where)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", c_void_p(), where=self.where)

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the driver with this device as the current device. Raises CudaError.

        Stream 0 is then the default stream of this device.
        """
        with self.current():
            self.driver.call(function, *arguments, where=self.where)

    def make_stream(self, *, high_priority: bool = False) -> int:
        """See Device.make_stream. The stream and the legacy default stream do not wait for each other."""
        stream, least, greatest = c_void_p(), c_int(), c_int()
        self.call("cuCtxGetStreamPriorityRange", least, greatest)
        self.call("cuStreamCreateWithPriority", stream, _NON_BLOCKING, greatest.value if high_priority else 0)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", stream)

    def make_event(self, *, timing: bool = False) -> CudaEvent:
        return CudaEvent(self, timing=timing)

    def wait(self, stream: int, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.call("cuStreamWaitEvent", stream, event.handle, 0)


class CudaEvent(Event):
    """See Event."""

    def __init__(self, device: CudaDevice, *, timing: bool) -> None:
        self._device, self.handle, self._process = device, c_void_p(), os.getpid()
        device.call("cuEventCreate", self.handle, 0 if timing else _DISABLE_TIMING)

    def record(self, stream: int) -> None:
        self._device.call("cuEventRecord", self.handle, stream)

    def done(self) -> bool:
        return self._device.driver.ready(self.handle, self._device.where)

    def synchronize(self) -> None:
        self._device.call("cuEventSynchronize", self.handle)

    def elapsed_ms(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        milliseconds = c_float()
        self._device.call("cuEventElapsedTime", milliseconds, earlier.handle, self.handle)
        return milliseconds.value

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing():  # modules are empty by then, and the end of the process frees the event
            return
        if self.handle.value and self._process == os.getpid():  # a forked child cannot use the parent's GPU
            with contextlib.suppress(CudaError):  # the GPU may have failed before
                self._device.call("cuEventDestroy_v2", self.handle)


@functools.cache
def open_device(index: int) -> CudaDevice:
    """Open GPU `index`, once. Raises as load_driver() and CudaDevice() do."""
    return CudaDevice(load_driver(), index)


def allow_captures() -> None:
    """Allow this thread to query events while another thread captures a CUDA graph, without failing the capture.

    Raises MissingDependencyError or CudaError.
    """
    load_driver().call("cuThreadExchangeStreamCaptureMode", c_int(_THREAD_LOCAL))
