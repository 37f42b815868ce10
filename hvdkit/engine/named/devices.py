"""Operations on tensors in the memory of GPUs: who does them. The engine knows no GPU and no framework.

An adapter announces such an operation with the option "device", so that ranks which have it in the memory of the host
get an error. It is done in the one order of operations, by what the adapter has registered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hvdkit.engine.named.operation import Operation, Ready
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport


class Devices(Protocol):
    """Does the operations of one engine whose tensors are on GPUs."""

    def open(self, operations: Sequence[Operation]) -> bool:
        """Can the ranks do them there? If not they go through the host's memory. Collective at the first call.

        operations: this rank's parts; without buffers on a rank that has joined.
        """

    def run(self, ready: Sequence[Ready], operations: Sequence[Operation]) -> None:
        """Enqueue them, all allreduces or a single one, and return; Operation.outcome then says when they are done."""

    def to_host(self, ready: Ready, operation: Operation) -> Operation:
        """This rank's part with buffers in the host's memory, copies of those on the GPU."""


#: Makes the Devices of an engine, given its transport.
OpenDevices = Callable[[Transport], Devices]
_openers: list[OpenDevices] = []


def on_device(open_devices: OpenDevices) -> None:
    """Have operations on GPUs done by what `open_devices` makes; the adapter that was loaded last counts."""
    _openers.append(open_devices)


def open_devices(transport: Transport) -> Devices:
    """The Devices of an engine. Raises HorovodInternalError where no adapter of GPU tensors is loaded."""
    if not _openers:
        raise HorovodInternalError(
            "Other ranks have called an operation with tensors of a GPU, and this process has loaded no adapter that "
            "can take part. Import the same framework's adapter on every rank, for example hvdkit.torch."
        )
    return _openers[-1](transport)
