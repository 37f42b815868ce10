"""The state of a sharded optimizer: gathered from all ranks' shards, and divided into shards again."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.layout import arrange
from hvdkit.torch.tensors import as_buffer, as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.small_collectives import allgather_object

#: An optimizer's state of a parameter, by name: tensors of its shape, other tensors, numbers.
State = Mapping[str, Any]


@dataclass(frozen=True)
class PieceState:
    """The state of one slice. parameter: its number in the optimizer. offset, count: elements in order of memory."""

    parameter: int
    offset: int
    count: int
    state: State


@dataclass(frozen=True)
class Layout:
    """The shape and strides of a parameter when it was divided; its memory may have another order now."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Elements:
    """Placeholder for a tensor with an element for each of the slice's; it is sent separately."""

    dtype: torch.dtype


def gather_state(
    transport: Transport, pieces: Sequence[PieceState], layouts: Sequence[Layout], root: int | None = None
) -> dict[int, dict[str, Any]]:
    """Gather the whole state by the number of the parameter, in host memory; collective.

    transport: of the ranks.
    pieces: the states of this rank's slices.
    layouts: by number of the parameter.
    root: the only rank that gets the result, {} on the others; None for all.

    Raises HorovodInternalError if a slice is on no rank.
    """
    flat: list[torch.Tensor] = []
    described = []
    for piece in pieces:
        entries: dict[str, Any] = {}
        for name, value in piece.state.items():
            if is_elementwise(name, value, (piece.count,)):
                entries[name] = _Elements(value.dtype)
                flat.append(value.detach().cpu().contiguous().view(torch.uint8))
            else:
                entries[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        described.append((piece.parameter, piece.offset, piece.count, entries))
    tables = allgather_object(transport, (described, sum(part.numel() for part in flat)))
    joined = as_buffer(torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8))
    counts = [nbytes for _, nbytes in tables]
    received = as_tensor(_collect(transport, joined, counts, root))
    if root is not None and root != transport.rank:
        return {}
    _check_covered(layouts, [one for table, _ in tables for one in table])
    whole: dict[int, dict[str, Any]] = {}
    for (table, _), start in zip(tables, itertools.accumulate([0, *counts[:-1]]), strict=True):
        _put(whole, layouts, table, received[start:])
    return dict(sorted(whole.items()))


def _collect(transport: Transport, joined: Buffer, counts: Sequence[int], root: int | None) -> Buffer:
    if root is None:
        return transport.allgather(joined, counts)
    sent = [joined.count * (rank == root) for rank in range(transport.size)]
    received = counts if root == transport.rank else [0] * transport.size
    return transport.alltoall(joined, sent, received)


def _check_covered(layouts: Sequence[Layout], table: Sequence[tuple[int, int, int, dict[str, Any]]]) -> None:
    """Raise HorovodInternalError if a slice of a parameter's state is on no rank."""
    counts = Counter[tuple[int, str]]()
    for number, _, count, entries in table:
        for name, value in entries.items():
            if isinstance(value, _Elements):
                counts[number, name] += count
    for (number, name), count in counts.items():
        if count != layouts[number].count:
            raise HorovodInternalError(
                f"Of {name!r} of parameter {number} the ranks have {count} of {layouts[number].count} elements: "
                "ranks that had the others have ended. Load a state that state_dict() returned before."
            )


def _put(
    whole: dict[int, dict[str, Any]],
    layouts: Sequence[Layout],
    table: Sequence[tuple[int, int, int, dict[str, Any]]],
    data: torch.Tensor,
) -> None:
    """Copy one rank's slices into the whole state. data: uint8, the rank's tensors one after the other."""
    at = 0
    for number, offset, count, entries in table:
        layout, state = layouts[number], whole.setdefault(number, {})
        for name, value in entries.items():
            if not isinstance(value, _Elements):
                state.setdefault(name, value)
                continue
            if name not in state:
                state[name] = torch.empty_strided(layout.shape, layout.strides, dtype=value.dtype)
            nbytes = count * value.dtype.itemsize
            # Copied first: a view requires an address aligned for the dtype.
            flatten(state[name])[offset : offset + count].copy_(data[at : at + nbytes].clone().view(value.dtype))
            at += nbytes


def cut_state(state: State, layout: Layout, offset: int, count: int) -> dict[str, Any]:
    """Return a slice of a parameter's whole state, in new memory.

    state: the whole state.
    layout: of the parameter.
    offset: first element.
    count: number of elements.
    """
    cut = {}
    for name, value in state.items():
        if is_elementwise(name, value, layout.shape):
            cut[name] = flatten(value, layout.strides)[offset : offset + count].clone()
        else:
            cut[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut


def is_elementwise(name: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an entry of a state has the tensor's elements; "step" is a counter, whatever its shape."""
    return isinstance(value, torch.Tensor) and name != "step" and tuple(value.shape) == shape


def flatten(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return a dense tensor as (n,) in memory order. strides: of the memory; a copy if they differ."""
    if strides is not None:
        tensor = arrange(tensor, strides)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
