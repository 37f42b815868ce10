"""Horovod's core as its Python bindings, one a framework, offer it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hvdkit.errors import HorovodInternalError

Kind = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]


@dataclass(frozen=True)
class Move:
    """One operation as Horovod's core is asked for it.

    name: the same on all ranks. op: of a reduction, average, sum, min, max, product or adasum. prescale, postscale: its
    factors. root: of a broadcast, in the world. splits: of an alltoall, rows for each rank. process_set: Horovod's
    object.
    """

    kind: Kind
    name: str
    process_set: Any
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: Sequence[int] = ()


class Pending(Protocol):
    """An operation that Horovod has taken."""

    def done(self) -> bool:
        """Would wait() return at once? Never waits."""

    def wait(self) -> list[Any]:
        """The results; blocks. Raises HorovodInternalError (hvdkit's) if the operation failed."""


class Binding(ABC):
    """Horovod's core by way of one framework; horovod, mpi_ops, elastic: the modules of Horovod's for it.

    framework: its name. basics: Horovod's object of that name: ranks, what was built, timeline. reduced: the dtypes
    that allreduce takes, see check_dtypes() for reducescatter. prefix: of the names of all operations.
    """

    framework: str
    reduced: frozenset[str]

    def __init__(self, horovod: Any, mpi_ops: Any, elastic: Any) -> None:
        self._horovod, self._elastic, self.basics, self.prefix = horovod, elastic, mpi_ops._basics, ""
        self._ops = {
            op: getattr(horovod, op.capitalize()) for op in ("average", "sum", "min", "max", "product", "adasum")
        }

    def init(self, sets: Sequence[Any] | str, comm: Any = None) -> None:
        """Start Horovod. sets, comm: as Horovod's init() takes them."""
        self._horovod.init(comm=comm, process_sets=sets)

    def shutdown(self) -> None:
        """End Horovod; collective."""
        self._horovod.shutdown()

    @abstractmethod
    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """Begin an operation on contiguous arrays, of the host's memory or the framework's tensors.

        One array, or several of an allreduce, which is done as one. What allreduce and broadcast give is in the arrays
        themselves; of the others Pending.wait() gives new ones, and of an alltoall also the rows from each rank.
        Raises HorovodInternalError if Horovod refuses it.
        """

    def prepare(self, move: Move, like: Any) -> Callable[[Any], Pending]:
        """A function that begins this allreduce (sum or average) of a tensor like this one, in place, in many calls."""
        return lambda array: self.start(move, [array])

    @abstractmethod
    def scale(self, array: Any, factor: float) -> None:
        """Multiply a framework's tensor of integers in place; what is not whole loses its fraction."""

    @abstractmethod
    def explain(self, error: Exception) -> HorovodInternalError:
        """Horovod's error as hvdkit's."""

    def changes(self) -> Any:
        """Horovod's notification manager, which hears of changes of the world."""
        return self._elastic.notification_manager

    def join(self) -> Callable[[], int | None]:
        """Begin to take part in the others' allreduces with zeros until all ranks have joined.

        Returns a function that gives the rank which joined last, None until that is known; it raises what the join
        failed with.
        """
        answers: list[int | HorovodInternalError] = []

        def take_part() -> None:
            try:
                answers.append(int(self._horovod.join()))
            except Exception as error:  # of this thread, for whoever asks for the answer
                answers.append(self.explain(error))

        def last_joined() -> int | None:
            answer = answers[0] if answers else None
            if isinstance(answer, HorovodInternalError):
                raise answer
            return answer

        threading.Thread(target=take_part, name="hvdkit-join", daemon=True).start()
        return last_joined


class GraphBinding(Binding):
    """A binding of a framework that has graphs."""

    @abstractmethod
    def operation(self, move: Move, tensor: Any) -> Any:
        """The operation as a part of the graph that is being traced; returns its result, a tensor of that graph."""
