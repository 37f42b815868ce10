"""Horovod's core by way of horovod.torch, for torch's tensors and for arrays in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as horovod
import torch
from horovod.common.exceptions import HorovodInternalError as CoreError
from horovod.torch import mpi_ops

from hvdkit.engine.horovod.binding import Move, Pending
from hvdkit.errors import HorovodInternalError

_OPS = {
    "average": horovod.Average,
    "sum": horovod.Sum,
    "min": horovod.Min,
    "max": horovod.Max,
    "product": horovod.Product,
    "adasum": horovod.Adasum,
}


class TorchBinding:
    """See Binding."""

    framework = "torch"
    #: What allreduce and reducescatter take.
    reduced = frozenset({"float16", "float32", "float64", "int32", "int64"})

    def __init__(self) -> None:
        self.basics = mpi_ops._basics

    def init(self, sets: Sequence[Any] | str) -> None:
        """See Binding."""
        horovod.init(process_sets=sets)

    def shutdown(self) -> None:
        """See Binding."""
        horovod.shutdown()

    def start(self, move: Move, arrays: Sequence[Any]) -> Pending:
        """See Binding."""
        tensors = [one if isinstance(one, torch.Tensor) else _see(one) for one in arrays]
        try:
            handle = _STARTING[move.kind](move, tensors)
        except (CoreError, NotImplementedError) as error:
            raise HorovodInternalError(f"Horovod: {error}") from None
        if move.kind in ("allreduce", "broadcast"):
            return _Handle(handle, arrays)
        return _Handle(handle, None, tensors[0] is arrays[0])

    def join(self) -> Callable[[], int | None]:
        """See Binding."""
        found: list[Any] = []

        def take_part() -> None:
            try:
                found.append(int(horovod.join()))
            except Exception as error:
                found.append(HorovodInternalError(f"Horovod: {error}"))

        threading.Thread(target=take_part, name="hvdkit-join", daemon=True).start()

        def answer() -> int | None:
            if found and isinstance(found[0], Exception):
                raise found[0]
            return found[0] if found else None

        return answer


class _Handle:
    """See Pending. results: where they are, if they are there already. as_tensors: what new results are."""

    def __init__(self, handle: int, results: Sequence[Any] | None, as_tensors: bool = False) -> None:
        self._handle, self._results, self._as_tensors = handle, results, as_tensors

    def done(self) -> bool:
        """See Pending."""
        return bool(mpi_ops.poll(self._handle))

    def wait(self) -> list[Any]:
        """See Pending."""
        try:
            made = mpi_ops.synchronize(self._handle)
        except CoreError as error:
            raise HorovodInternalError(f"Horovod: {error}") from None
        if self._results is not None:
            return list(self._results)
        results = list(made) if isinstance(made, tuple) else [made]
        return results if self._as_tensors else [one.numpy() for one in results]


def _see(array: Any) -> torch.Tensor:
    """An array of the host's memory as a tensor, sharing memory; a copy of one that may not be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _allreduce(move: Move, tensors: list[torch.Tensor]) -> int:
    options: dict[str, Any] = {
        "name": move.name,
        "op": _OPS[move.op],
        "prescale_factor": move.prescale,
        "postscale_factor": move.postscale,
        "process_set": move.process_set,
    }
    if len(tensors) == 1:
        return int(horovod.allreduce_async_(tensors[0], **options))
    return int(horovod.grouped_allreduce_async_(tensors, **options))


def _broadcast(move: Move, tensors: list[torch.Tensor]) -> int:
    return int(horovod.broadcast_async_(tensors[0], move.root, name=move.name, process_set=move.process_set))


def _allgather(move: Move, tensors: list[torch.Tensor]) -> int:
    return int(horovod.allgather_async(tensors[0], name=move.name, process_set=move.process_set))


def _alltoall(move: Move, tensors: list[torch.Tensor]) -> int:
    splits = torch.tensor(list(move.splits), dtype=torch.int32)
    return int(horovod.alltoall_async(tensors[0], splits, name=move.name, process_set=move.process_set))


def _reducescatter(move: Move, tensors: list[torch.Tensor]) -> int:
    return int(
        horovod.reducescatter_async(
            tensors[0],
            name=move.name,
            op=_OPS[move.op],
            process_set=move.process_set,
            prescale_factor=move.prescale,
            postscale_factor=move.postscale,
        )
    )


_STARTING: dict[str, Callable[[Move, list[torch.Tensor]], int]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
