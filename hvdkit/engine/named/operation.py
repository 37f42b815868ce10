"""A named operation: what a rank announces, what all ranks are answered, and one rank's part of it."""

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

#: The name under which join() is answered.
JOIN = "join"
#: The option that says where tensors are; without it they are in the memory of the host.
DEVICE = "device"


@dataclass(frozen=True)
class Announcement:
    """One rank's wish for an operation.

    kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or the word for a collective step. tensors:
    (dtype, shape) of each tensor of the operation, a group having several. options: what all ranks must give alike, as
    (word, value). splits: rows for each rank, of an alltoall; the ranks' own.
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
        """As it is sent: the pickled fields."""
        return pickle.dumps((self.kind, self.tensors, self.options, self.splits), pickle.HIGHEST_PROTOCOL)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(math.prod(shape) for _, shape in self.tensors)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(
            count * STORAGE[dtype].itemsize for count, (dtype, _) in zip(self.counts, self.tensors, strict=True)
        )

    @functools.cached_property
    def op(self) -> str:
        """Of a reduction: an Op, "average" or "adasum"; "" of other kinds."""
        return self.option("op")

    @functools.cached_property
    def sums(self) -> Op:
        """What the transport is to do in a reduction: an average is a sum."""
        return "sum" if self.op == "average" else self.op  # type: ignore[return-value]

    @functools.cached_property
    def fusible(self) -> bool:
        """May it be done with others as one allreduce in the host's memory?"""
        return self.kind == "allreduce" and self.op != "adasum" and not self.on_device

    @functools.cached_property
    def on_device(self) -> bool:
        """Are the tensors in the memory of a GPU?"""
        return self.device != "cpu"

    @functools.cached_property
    def device(self) -> str:
        """Where the tensors are that are given to the engine: "cpu" or "cuda"."""
        return self.option(DEVICE) or "cpu"

    def at(self, device: str) -> Announcement:
        """The same operation on tensors there, "cpu" or "cuda"."""
        options = tuple(option for option in self.options if option[0] != DEVICE)
        return dataclasses.replace(self, options=options if device == "cpu" else (*options, (DEVICE, device)))

    @functools.cached_property
    def prescale(self) -> float:
        """What is multiplied with before the reduction."""
        return float(self.option("prescale factor") or 1)

    @functools.cached_property
    def postscale(self) -> float:
        """What is multiplied with after the reduction, apart from the division of an average."""
        return float(self.option("postscale factor") or 1)

    def option(self, word: str) -> str:
        """The value of an option; "" without it."""
        return dict(self.options).get(word, "")


#: Announced under no name: this rank has no more work of its own, until all have joined.
JOINING = Announcement("join", ())
#: Announced under the name of an operation: this rank does not wait for it any more.
WITHDRAWING = Announcement("withdraw", ())


class Ready(NamedTuple):
    """All ranks have announced it: it is done now.

    asked: as one of the ranks announced it. rows: for each rank, of an allgather the first dimension of each tensor, of
    an alltoall the splits. joined: ranks that take part with zeros. number: what ranks announce it by from now on; -1
    for none, and for an operation that is done by its number.
    """

    name: str
    asked: Announcement
    rows: tuple[tuple[int, ...], ...] = ()
    joined: tuple[int, ...] = ()
    number: int = -1


class Failed(NamedTuple):
    """It cannot be done, on any rank. disagree: as the ranks have announced what does not go together."""

    name: str
    why: str
    disagree: bool = False


class AllJoined(NamedTuple):
    """Every rank has joined; they are all free again. last: the one that came last."""

    last: int


class Closed(NamedTuple):
    """Nothing can be done any more, since a rank has left that answers or passes on answers."""

    why: str


#: An integer is the number of an operation that is ready, with no rank joined.
Answer = int | Ready | Failed | AllJoined | Closed

#: What an operation of a kind of its own does, given the transport and the ranks that have joined.
Action = Callable[[Transport, Sequence[int]], Any]


@dataclass(slots=True, eq=False)
class Operation:
    """One rank's part of a named operation.

    buffers: contiguous, one a tensor; read, and by allreduce and broadcast overwritten. action: what is done, of a kind
    that is no collective; the engine goes on if it raises alike on all ranks. results: of the kinds that do not
    overwrite, in new memory. rows: what the ranks brought along, see Ready. outcome: what the action returned; of
    tensors on a GPU see Devices. last_joined: of a join. error: instead of a result; set before done.
    """

    name: str
    asked: Announcement
    buffers: Sequence[Buffer]
    action: Action | None = None
    results: Sequence[Buffer] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    outcome: Any = None
    last_joined: int = -1
    done: bool = False
    error: Exception | None = None


def label_of(kind: str, name: str) -> str:
    """An operation in messages."""
    return name if name.startswith(kind) else f"{kind} ({name})"
