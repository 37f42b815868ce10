"""The accelerator of this torch, by torch's module for it: torch.cuda (also on AMD), torch.xpu, or a plug-in's."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.device.host import HostDevice
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.device import Device, Event, Stream


def built_for() -> str:
    """Return the type of device that this torch was built for, or a plug-in has registered; "" for none.

    It does not depend on the devices of the host, so all ranks of a job that import the same packages have the same.
    "" also for a type of device without streams, such as Apple's "mps".
    """
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None  # since 2.6
    if device is not None:
        return device.type if hasattr(getattr(torch, device.type, None), "current_stream") else ""
    # torch 2.6 names an accelerator only on a host that has one.
    return "cuda" if torch.version.cuda or torch.version.hip else "xpu" if torch.xpu._is_compiled() else ""


def module_of(device_type: str) -> Any:
    """Return torch's module of a type of device, for example torch.cuda."""
    return getattr(torch, device_type)


def common_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device that holds all tensors; None if they are on several."""
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 else None


def current_device(device_type: str) -> torch.device:
    """Return the calling thread's current device of a type."""
    return (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, module_of(device_type).current_device())
    )


def identify(device: torch.device) -> str:
    """Return a text that is the same in all processes which use this device, and differs between devices."""
    if device.type == "cpu":
        return f"process {os.getpid()} on {socket.gethostname()}"
    properties = module_of(device.type).get_device_properties(device.index)
    # All that there are: AMD gives one uuid to all devices of some models, and parts of a device share its bus.
    names = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
    known = [str(getattr(properties, name)) for name in names if getattr(properties, name, None) is not None]
    if known:
        return f"{' '.join(known)} on {socket.gethostname()}"
    return f"{device} of process {os.getpid()} on {socket.gethostname()}"  # not known: taken for a device of its own


class TorchEvent(Event):
    """See Event: an event of torch. event: torch's object."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def record(self, stream: Stream) -> None:
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_ms(self, earlier: Event) -> float:
        assert isinstance(earlier, TorchEvent)
        return float(earlier.event.elapsed_time(self.event))


class TorchDevice(Device):
    """See Device: an accelerator of torch. Streams are objects of torch, which keeps them for ever."""

    def __init__(self, device: torch.device) -> None:
        self.index, self.where, self._device, self._module = device.index, str(device), device, module_of(device.type)

    def make_stream(self, *, high_priority: bool = False) -> Stream:
        stream: Stream = self._module.Stream(device=self._device, priority=-1 if high_priority else 0)
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """See Device.destroy_stream. torch keeps its streams."""

    def make_event(self, *, timing: bool = False) -> TorchEvent:
        return TorchEvent(self._module.Event(enable_timing=timing))

    def wait(self, stream: Any, event: Event) -> None:
        assert isinstance(event, TorchEvent)
        stream.wait_event(event.event)

    def current(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._module.device(self.index)
        return context


class Accelerator:
    """A device of torch with the calls that depend on its type; the CPU's have nothing to order.

    device: torch's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_host = device.type == "cpu"
        self.streams: Device = HostDevice() if self.on_host else TorchDevice(device)
        self._module = module_of(device.type)
        self._is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on the device.

        Raises HorovodInternalError while the stream is captured in a graph.
        """
        if self.on_host:
            return 0
        if self._is_capturing():
            raise HorovodInternalError(
                "Gradients or other tensors were to be exchanged while a CUDA graph is being captured. A graph would "
                "repeat this rank's part without hvdkit's checks that all ranks take part. Capture forward and "
                "backward of a model that is not wrapped, and call optimizer.synchronize() after the graph has been "
                "replayed; call collectives outside of the graph."
            )
        stream: Stream = self._module.current_stream(self.device.index)
        return stream

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the calling thread's current stream."""
        context: AbstractContextManager[Any] = nullcontext() if self.on_host else self._module.stream(stream)
        return context

    def allocate(self, count: int, dtype: str) -> TensorBuffer:
        """Allocate memory (count,) of zeros, on the current stream."""
        return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype], device=self.device), dtype)

    def record_event(self) -> Event:
        """Record an event after the calling thread's work on its current stream; raises as current_stream() does."""
        event = self.streams.make_event()
        event.record(self.current_stream())
        return event

    def record_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Delay reuse of the tensors' memory until the work now on the current stream has run."""
        if not self.on_host:
            stream = self._module.current_stream(self.device.index)
            for tensor in tensors:
                tensor.record_stream(stream)


@torch.no_grad()
def scale(buffer: Buffer, factor: float) -> None:
    """Multiply a TensorBuffer in place, on the current stream."""
    assert isinstance(buffer, TensorBuffer)
    buffer.array.mul_(factor)
