"""A named operation: a rank's announcement of it, the answer to all ranks, and one rank's state of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import STORAGE, Buffer, Op

Shape = tuple[int, ...]
Options = tuple[tuple[str, str], ...]

#: The name of join() in answers.
JOIN = "join"
#: The option with the device of the tensors; without it they are in host memory.
DEVICE = "device"


@dataclass(frozen=True)
class OperationRequest:
    """One rank's request for an operation.

    kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or the word for a collective step.
    tensors: (dtype, shape) of each tensor of the operation; a grouped operation has several.
    options: (word, value) pairs that must be equal on all ranks.
    splits: of an alltoall, the rows for each rank; may differ between ranks.
    """

    kind: str
    tensors: tuple[tuple[str, Shape], ...]
    options: Options = ()
    splits: tuple[int, ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.tensors, self.options, self.splits))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def encoded(self) -> bytes:
        """The pickled fields, for sending."""
        return pickle.dumps((self.kind, self.tensors, self.options, self.splits), pickle.HIGHEST_PROTOCOL)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of elements of each tensor."""
        return tuple(math.prod(shape) for _, shape in self.tensors)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The size of each tensor in bytes."""
        return tuple(
            count * STORAGE[dtype].itemsize for count, (dtype, _) in zip(self.counts, self.tensors, strict=True)
        )

    @functools.cached_property
    def op(self) -> str:
        """The operation of a reduction: an Op, "average" or "adasum"; "" for other kinds."""
        return self.option("op")

    @functools.cached_property
    def sums(self) -> Op:
        """The operation that the transport performs in a reduction: "sum" for an average."""
        return "sum" if self.op == "average" else self.op  # type: ignore[return-value]

    @functools.cached_property
    def fusible(self) -> bool:
        """May it be fused with others into one allreduce in host memory?"""
        return self.kind == "allreduce" and self.op != "adasum" and not self.on_device

    @functools.cached_property
    def on_device(self) -> bool:
        """Are the tensors in the memory of a GPU?"""
        return self.device != "cpu"

    @functools.cached_property
    def device(self) -> str:
        """The device of the tensors that are passed to the engine: "cpu", or the adapter's word for another one."""
        return self.option(DEVICE) or "cpu"

    def at(self, device: str) -> OperationRequest:
        """Return the same request for tensors on another device; see `device`."""
        options = tuple(option for option in self.options if option[0] != DEVICE)
        return dataclasses.replace(self, options=options if device == "cpu" else (*options, (DEVICE, device)))

    @functools.cached_property
    def prescale(self) -> float:
        """The factor before the reduction."""
        return float(self.option("prescale factor") or 1)

    @functools.cached_property
    def postscale(self) -> float:
        """The factor after the reduction, without the division of an average."""
        return float(self.option("postscale factor") or 1)

    def option(self, word: str) -> str:
        """Return the value of an option; "" without it."""
        return dict(self.options).get(word, "")


#: Announced without a name: this rank has no more work of its own until all ranks have joined.
JOINING = OperationRequest("join", ())
#: Announced under the name of an operation: this rank no longer waits for it.
WITHDRAWING = OperationRequest("withdraw", ())


class Ready(NamedTuple):
    """The answer to an operation that all ranks have announced: execute it now.

    name: of the operation.
    request: that of one of the ranks.
    rows: of each rank; for an allgather the first dimension of each tensor, for an alltoall the splits.
    joined: ranks that take part with zeros.
    number: the number by which ranks announce the operation from now on; -1 for none, and for an operation that was
        announced by its number.
    """

    name: str
    request: OperationRequest
    rows: tuple[tuple[int, ...], ...] = ()
    joined: tuple[int, ...] = ()
    number: int = -1


class Failed(NamedTuple):
    """The answer to an operation that fails on all ranks. disagree: because the announcements contradict each other."""

    name: str
    why: str
    disagree: bool = False


class AllJoined(NamedTuple):
    """The answer when every rank has joined; no rank counts as joined from then on. last: the rank that joined last."""

    last: int


class Closed(NamedTuple):
    """Ends all operations, because a rank has left that makes answers or passes them on."""

    why: str


#: An integer is the number of an operation that is ready, with no rank joined.
Answer = int | Ready | Failed | AllJoined | Closed

#: The function that a collective step runs; it gets the transport and the ranks that have joined.
Action = Callable[[Transport, Sequence[int]], Any]


@dataclass(slots=True, eq=False)
class Operation:
    """One rank's state of a named operation.

    name: of the operation.
    request: this rank's.
    buffers: contiguous, one a tensor; read, and overwritten by allreduce and broadcast.
    action: runs instead of a collective; if it raises the same error on all ranks, the engine goes on.
    results: in new memory, of the kinds that do not overwrite their buffers.
    rows: the rows of each rank, see Ready.
    outcome: the result of the action; for tensors on a GPU see Devices.
    last_joined: of a join, the rank that joined last.
    done: set when the operation has ended, last of all fields.
    error: set instead of a result; None without an error.
    """

    name: str
    request: OperationRequest
    buffers: Sequence[Buffer]
    action: Action | None = None
    results: Sequence[Buffer] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    outcome: Any = None
    last_joined: int = -1
    done: bool = False
    error: Exception | None = None


def label_of(kind: str, name: str) -> str:
    """Name an operation for messages."""
    return name if name.startswith(kind) else f"{kind} ({name})"
