"""What Horovod's Python bindings, one a framework, have in common here, and which of them there is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hvdkit.engine.horovod.real import real_horovod
from hvdkit.errors import MissingDependencyError

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


class Binding(Protocol):
    """Horovod's core by way of one framework.

    framework: its name. basics: Horovod's object of that name: ranks, what was built, timeline. reduced: the dtypes
    that allreduce takes, see check_dtypes() for reducescatter. prefix: of the names of all operations.
    """

    framework: str
    basics: Any
    reduced: frozenset[str]
    prefix: str

    def init(self, sets: Sequence[Any] | str, comm: Any = None) -> None:
        """Start Horovod. sets, comm: as Horovod's init() takes them."""

    def shutdown(self) -> None:
        """End Horovod; collective."""

    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """Begin an operation on contiguous arrays, of the host's memory or the framework's tensors.

        One array, or several of an allreduce, which is done as one. What allreduce and broadcast give is in the arrays
        themselves; of the others Pending.wait() gives new ones, and of an alltoall also the rows from each rank.
        Raises HorovodInternalError if Horovod refuses it.
        """

    def prepare(self, move: Move, like: Any) -> Callable[[Any], Pending]:
        """A function that begins this allreduce (sum or average) of a tensor like this one, in place, in many calls."""

    def scale(self, array: Any, factor: float) -> None:
        """Multiply a framework's tensor of integers in place; what is not whole loses its fraction."""

    def changes(self) -> Any:
        """Who hears of changes of the world: Horovod's notification manager."""

    def join(self) -> Callable[[], int | None]:
        """Begin to take part in the others' allreduces with zeros until all ranks have joined.

        Returns what tells the rank that joined last, and until that is known None; it raises what the join failed with.
        """


class GraphBinding(Binding, Protocol):
    """Of a framework that has graphs."""

    def operation(self, move: Move, tensor: Any) -> Any:
        """The operation as a part of the graph that is being traced; returns its result, a tensor of that graph."""


_LIBRARIES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}
_CURE = (
    "Run `hvdkit build-horovod`, which builds it against the frameworks installed here, or take hvdkit's own engine "
    "(HVDKIT_ENGINE=native)."
)


def built_bindings() -> list[str]:
    """The frameworks that the Horovod which is installed here was built for; nothing is loaded."""
    with real_horovod():
        found = importlib.util.find_spec("horovod")
    if found is None:
        return []
    places = [Path(place) for place in found.submodule_search_locations or ()]
    return [
        framework
        for framework, library in _LIBRARIES.items()
        if any(any((place / framework).glob(f"{library}*.so")) for place in places)
    ]


def horovod_version() -> str:
    """The version of Horovod that is installed; "" for none."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return ""


def choose_binding(framework: str, built: Sequence[str]) -> str:
    """The binding to use for scripts of a framework. framework: "" for one that Horovod has no binding for.

    Raises MissingDependencyError where there is none.
    """
    if not built:
        raise MissingDependencyError(
            f"The engine is to be Horovod's core (HVDKIT_ENGINE=horovod), and Horovod is not installed here, or was "
            f"built for neither torch nor tensorflow. {_CURE}"
        )
    if framework and framework not in built:
        raise MissingDependencyError(
            f"Horovod is installed here with a binding for {', '.join(built)}, and this script needs the one for "
            f"{framework}. {_CURE}"
        )
    return framework or built[0]


def open_binding(framework: str) -> Binding:
    """Load the binding for a framework; see choose_binding()."""
    name = choose_binding(framework, built_bindings())
    try:
        with real_horovod():
            if name == "torch":
                from hvdkit.engine.horovod.torch_binding import TorchBinding

                return TorchBinding()
            from hvdkit.engine.horovod.tensorflow_binding import TensorflowBinding

            return TensorflowBinding()
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"Horovod's binding for {name} cannot be loaded: {error}. {_CURE}") from error
