"""A torch with an accelerator that does nothing but record the order of the work: tensors on torch's device "meta".

Such tensors have no numbers, so that a read of one by the host is an error.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from hvdkit.torch.device import accelerator, group, groups, operations

DEVICE = "meta"
#: (call, its arguments) in the order of the calls of all threads.
Trace = list[tuple[Any, ...]]


class FakeStream:
    """torch.Stream."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self.name = trace, name

    def wait_event(self, event: FakeEvent) -> None:
        """Order later work behind an event."""
        assert event.stream, "the event was never recorded"
        self._trace.append(("wait", self.name, event.number))

    def synchronize(self) -> None:
        """The host waits."""
        raise AssertionError("the host waits for a stream")


class FakeEvent:
    """torch.Event."""

    _numbers = itertools.count()

    def __init__(self, trace: Trace, *, timing: bool) -> None:
        self._trace, self._timing, self.number, self.stream = trace, timing, next(self._numbers), ""

    def record(self, stream: FakeStream) -> None:
        """Record the present end of a stream's work. Events for times are not in the trace."""
        self.stream = stream.name
        if not self._timing:
            self._trace.append(("record", stream.name, self.number))

    def query(self) -> bool:
        """The device has reached it."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        raise AssertionError("the host waits for an event")

    def elapsed_time(self, _: FakeEvent) -> float:
        """In milliseconds."""
        return 1.0


class FakeModule:
    """torch.cuda and the like. Each thread has its current stream, "default" at first.

    ended: the device has done all of its work; not before the test sets it.
    """

    def __init__(self) -> None:
        self.trace: Trace = []
        self.ended = False
        self._default = FakeStream(self.trace, "default")
        self._current = threading.local()
        self._streams = itertools.count()

    def Stream(self, *, device: torch.device, priority: int) -> FakeStream:
        assert device.type == DEVICE and priority == -1
        return FakeStream(self.trace, f"engine {next(self._streams)}")

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        return FakeEvent(self.trace, timing=enable_timing)

    def current_device(self) -> int:
        """The number of the calling thread's device."""
        return 0

    @contextmanager
    def device(self, _: object) -> Iterator[None]:
        """The device is current within."""
        yield

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """The stream is current within."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def current_stream(self, _: object = None) -> FakeStream:
        """The calling thread's current stream."""
        stream: FakeStream = getattr(self._current, "stream", self._default)
        return stream

    def use(self, stream: FakeStream | None) -> None:
        """Make a stream the calling thread's current one; None: the default."""
        self._current.stream = stream or self._default

    def get_device_properties(self, _: object) -> object:
        """None of these has an identifier."""
        return object()

    def note(self, *call: Any) -> None:
        """Write down a call with the stream that is current."""
        self.trace.append((call[0], self.current_stream().name, *call[1:]))


class FakeWork:
    """torch.distributed's Work."""

    def __init__(self, module: FakeModule, number: int) -> None:
        self._module, self._number = module, number

    def is_completed(self) -> bool:
        """The device has done the operation."""
        return self._module.ended

    def wait(self, *_: object) -> bool:
        """Order the current stream behind the operation."""
        self._module.note("join", self._number)
        return True


class FakeBackend:
    """A backend of torch.distributed: every call of it is written down with the number of its operation."""

    def __init__(self, module: FakeModule) -> None:
        self._module, self._numbers = module, itertools.count()

    def __getattr__(self, name: str) -> Any:
        if name in ("abort", "shutdown"):
            raise AttributeError(name)

        def begin(*_: object) -> FakeWork:
            number = next(self._numbers)
            self._module.note("begin", number, name)
            return FakeWork(self._module, number)

        return begin


@contextmanager
def fake_accelerator() -> Iterator[FakeModule]:
    """Within, torch has this accelerator, and a backend for it."""
    module = FakeModule()

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        module.trace.append(("used", stream.name, tensor.numel()))

    def new_empty(tensor: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        if not more:  # torch's own functions for this device give more
            module.note("allocate", given[0])
        return plain(tensor, *given, **more)

    plain = torch.Tensor.new_empty
    with ExitStack() as stack:
        for where, name, value in (
            (accelerator, "module_of", lambda _: module),
            (accelerator, "built_for", lambda: DEVICE),
            (operations, "built_for", lambda: DEVICE),
            (groups, "built_for", lambda: DEVICE),
            (groups, "choose_backend", lambda _: "fake"),
            (group, "make_backend", lambda *_, **__: FakeBackend(module)),
            (group, "connect_ranks", lambda *_: None),  # its operation would end only when a test says so
            (torch.Tensor, "record_stream", record_stream),
            (torch.Tensor, "new_empty", new_empty),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield module
