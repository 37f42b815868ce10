"""A GPU through the C interface of its driver, by ctypes, independent of the framework: see cuda.py and hip.py.

Frameworks' streams are passed as handles, such as torch.cuda.current_stream().cuda_stream. The numbers below are the
same in CUDA and in HIP.
"""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from ctypes import c_char_p, c_float, c_int, c_ubyte, c_void_p
from typing import Any, ClassVar

from hvdkit.errors import TransportError
from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.device import Device, Event

_SUCCESS = 0
_OUT_OF_MEMORY = 2
_NOT_READY = 600
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

Uuid = c_ubyte * 16


class DriverError(TransportError):
    """A call of a GPU's driver has failed. result: the CUresult or hipError_t that it returned."""

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result


class Driver(ABC):
    """An opened driver. path: its file. version: of CUDA or HIP, as (major, minor).

    A subclass names the library, and does what differs between vendors.

    library: functions of these names: init, driver_version, device_count, uuid, priority_range, create_stream,
        destroy_stream, wait_event, create_event, destroy_event, record_event, query_event, synchronize_event,
        elapsed_time, exchange_capture_mode, error_string.
    result_type: name of the type that functions return, for messages.
    visible: variables that select the GPUs of a process, for messages.
    """

    library: ClassVar[CLibrary]
    result_type: ClassVar[str]
    visible: ClassVar[str]

    def __init__(self, path: str = "") -> None:
        """Open the driver. path: its file; "" to find it.

        Raises MissingDependencyError if it is missing, DriverError if it does not start.
        """
        self.path, self._functions = self.library.open(path or self.find())
        self.call("init", 0)
        code = c_int()
        self.call("driver_version", code)
        self.version = self.decode_version(code.value)

    @classmethod
    def find(cls) -> str:
        """Return the file to open; "" for the first of those that the library names."""
        return ""

    @staticmethod
    @abstractmethod
    def decode_version(code: int) -> tuple[int, int]:
        """Return major and minor version."""

    @abstractmethod
    def open_gpu(self, index: int, where: str) -> tuple[str, Any]:
        """Return an identity of a GPU that no other GPU of the job has, and what current() takes.

        index: number of the GPU among those that this process sees.
        where: the GPU, for messages.
        """

    @abstractmethod
    def current(self, opened: Any, where: str) -> AbstractContextManager[None]:
        """Return a context in which a GPU is the calling thread's current one. opened: from open_gpu()."""

    def call(self, function: str, *arguments: object, where: str = "") -> None:
        """Call a function by its name in the table. where: the GPU, for the message. Raises DriverError."""
        if (result := self._functions[function](*arguments)) != _SUCCESS:
            raise self.error(function, result, where)

    def ready(self, event: c_void_p, where: str) -> bool:
        """Return whether an event is done. Raises DriverError."""
        result: int = self._functions["query_event"](event)
        if result not in (_SUCCESS, _NOT_READY):
            raise self.error("query_event", result, where)
        return result == _SUCCESS

    def allow_captures(self) -> None:
        """Allow this thread to query events while another thread captures a CUDA graph, without failing the capture.

        Raises DriverError.
        """
        self.call("exchange_capture_mode", c_int(_THREAD_LOCAL))

    def error(self, function: str, result: int, where: str = "") -> DriverError:
        """Make the error of a call that returned `result`."""
        text = c_char_p()
        self._functions["error_string"](result, text)
        words = (text.value or b"unknown error").decode(errors="replace")
        cure = " Use a smaller batch or bucket, or fewer ranks on the GPU." if result == _OUT_OF_MEMORY else ""
        symbol, _ = self.library.functions[function]
        return DriverError(
            f"{symbol} failed{f' on {where}' if where else ''}: {words} ({self.result_type} {result}).{cure}", result
        )


class GpuDevice(Device):
    """See Device: GPU `index` of those that this process sees. uuid: identity of the GPU, from Driver.open_gpu()."""

    def __init__(self, driver: Driver, index: int) -> None:
        """Open the GPU. Raises TransportError if this process sees fewer GPUs, DriverError if the driver fails."""
        self.driver, self.index = driver, index
        self.where = f"GPU {index}"
        count = c_int()
        driver.call("device_count", count)
        if not 0 <= index < count.value:
            raise TransportError(
                f"There is no GPU {index}: this process sees {count.value}. Start one rank a GPU (hvdrun -np gpu), or "
                f"look at {driver.visible}."
            )
        self.uuid, self._opened = driver.open_gpu(index, self.where)

    def current(self) -> AbstractContextManager[None]:
        return self.driver.current(self._opened, self.where)

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the driver with this device as the current device. Raises DriverError.

        Stream 0 is then the default stream of this device.
        """
        with self.current():
            self.driver.call(function, *arguments, where=self.where)

    def make_stream(self, *, high_priority: bool = False) -> int:
        """See Device.make_stream. The stream and the legacy default stream do not wait for each other."""
        stream, least, greatest = c_void_p(), c_int(), c_int()
        self.call("priority_range", least, greatest)
        self.call("create_stream", stream, _NON_BLOCKING, greatest.value if high_priority else 0)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.call("destroy_stream", stream)

    def make_event(self, *, timing: bool = False) -> GpuEvent:
        return GpuEvent(self, timing=timing)

    def wait(self, stream: int, event: Event) -> None:
        assert isinstance(event, GpuEvent)
        self.call("wait_event", stream, event.handle, 0)


class GpuEvent(Event):
    """See Event."""

    def __init__(self, device: GpuDevice, *, timing: bool) -> None:
        self._device, self.handle, self._process = device, c_void_p(), os.getpid()
        device.call("create_event", self.handle, 0 if timing else _DISABLE_TIMING)

    def record(self, stream: int) -> None:
        self._device.call("record_event", self.handle, stream)

    def done(self) -> bool:
        return self._device.driver.ready(self.handle, self._device.where)

    def synchronize(self) -> None:
        self._device.call("synchronize_event", self.handle)

    def elapsed_ms(self, earlier: Event) -> float:
        assert isinstance(earlier, GpuEvent)
        milliseconds = c_float()
        self._device.call("elapsed_time", milliseconds, earlier.handle, self.handle)
        return milliseconds.value

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing():  # modules are empty by then, and the end of the process frees the event
            return
        if self.handle.value and self._process == os.getpid():  # a forked child cannot use the parent's GPU
            with contextlib.suppress(DriverError):  # the GPU may have failed before
                self._device.call("destroy_event", self.handle)
