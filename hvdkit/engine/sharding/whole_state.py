"""The whole state of a sharded optimizer, gathered from the ranges of all ranks; the same for every framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import STORAGE, Buffer
from hvdkit.transport.small_collectives import allgather_object


@dataclass(frozen=True)
class RangeState:
    """The state of consecutive elements of one tensor, as one rank has it.

    tensor: number of the tensor in the optimizer.
    offset: the first element, in the order of the tensor's memory.
    count: number of elements.
    entries: by name: a Buffer (count,) in host memory with a number for each element, or any other object that can be
        pickled and that all ranges of the tensor share.
    """

    tensor: int
    offset: int
    count: int
    entries: Mapping[str, Any]


@dataclass(frozen=True)
class _Elements:
    """Placeholder for a Buffer, whose numbers are sent separately."""

    dtype: str


def gather_state(
    transport: Transport,
    ranges: Sequence[RangeState],
    counts: Sequence[int],
    names: Sequence[str],
    *,
    divided: Iterable[int] = (),
    wanted: bool = True,
) -> dict[int, dict[str, Any]]:
    """Gather the entries of all ranges by number of the tensor; a Buffer (counts[tensor],) for each Buffer; collective.

    The entries of one name are sent together, so that a rank has, besides the result, those of one name at a time.

    transport: of the ranks.
    ranges: of this rank; without entries, if the tensor has no state.
    counts: number of elements of each tensor.
    names: of the tensors, for messages; "" for an unknown one.
    divided: numbers of the tensors that this rank knows to be divided among the ranks.
    wanted: whether this rank gets the result; {} otherwise.

    Raises HorovodInternalError if elements of a tensor's entry, or all elements of a divided tensor, are on no rank.
    """
    described = [
        RangeState(one.tensor, one.offset, one.count, {name: _described(value) for name, value in one.entries.items()})
        for one in ranges
    ]
    gathered = allgather_object(transport, (described, wanted, sorted(divided)))
    receivers = [rank for rank, (_, wants, _) in enumerate(gathered) if wants]
    tables = _resolve_single_elements([table for table, _, _ in gathered])
    _check_covered(tables, counts, names, {tensor for _, _, known in gathered for tensor in known})
    whole: dict[int, dict[str, Any]] = {}
    for one in (one for table in tables for one in table if one.entries):
        entries = whole.setdefault(one.tensor, {})
        for name, value in one.entries.items():
            if name not in entries:
                entries[name] = _allocate(value, counts[one.tensor] if wanted else 0)
    names = [name for table in tables for one in table for name, value in one.entries.items() if _is_sent(value)]
    for name in dict.fromkeys(names):
        _gather_entry(transport, name, ranges, tables, receivers, whole)
    return dict(sorted(whole.items())) if wanted else {}


def _resolve_single_elements(tables: Sequence[Sequence[RangeState]]) -> list[list[RangeState]]:
    """Return the tables with an entry of a range of one element as shared, if another range shares it.

    In a range of one element, an array of one number that all elements share looks like one with a number for each.
    """
    shared: dict[tuple[int, str], Any] = {}
    for one in (one for table in tables for one in table if one.count != 1):
        shared.update({(one.tensor, name): value for name, value in one.entries.items() if not _is_sent(value)})

    def resolve(one: RangeState) -> RangeState:
        if one.count != 1:
            return one
        known = {name: shared.get((one.tensor, name), value) for name, value in one.entries.items()}
        return replace(one, entries=known)

    return [[resolve(one) for one in table] for table in tables]


def _described(value: Any) -> Any:
    return _Elements(value.dtype) if isinstance(value, Buffer) else value


def _allocate(value: Any, count: int) -> Any:
    return Buffer(np.empty(count, STORAGE[value.dtype]), value.dtype) if isinstance(value, _Elements) else value


def _is_sent(value: Any) -> bool:
    return isinstance(value, _Elements)


def _check_covered(
    tables: Sequence[Sequence[RangeState]], counts: Sequence[int], names: Sequence[str], divided: Iterable[int]
) -> None:
    """Raise HorovodInternalError for a missing range. See gather_state()."""
    lost = sorted({*divided}.difference(one.tensor for table in tables for one in table))
    if lost := [tensor for tensor in lost if counts[tensor]]:
        raise HorovodInternalError(
            f"The ranks have no elements of the state of {', '.join(_name(tensor, names) for tensor in lost)}: the "
            "ranks that had them have ended. Load a state that was saved before (elastic jobs: state.restore())."
        )
    found = Counter[tuple[int, str]]()
    for one in (one for table in tables for one in table):
        for name, value in one.entries.items():
            if _is_sent(value):
                found[one.tensor, name] += one.count
    for (tensor, name), count in found.items():
        if count != counts[tensor]:
            raise HorovodInternalError(
                f"Of {name!r} of {_name(tensor, names)} the ranks have {count} of {counts[tensor]} elements: "
                "ranks that had the others have ended, and the state is that of an earlier save; or the optimizer has "
                "an entry with another number of elements than the parameter, which cannot be divided."
            )


def _name(tensor: int, names: Sequence[str]) -> str:
    return f"parameter {tensor}" + (f" ({names[tensor]})" if names[tensor] else "")


def _gather_entry(
    transport: Transport,
    name: str,
    ranges: Sequence[RangeState],
    tables: Sequence[Sequence[RangeState]],
    receivers: Sequence[int],
    whole: Mapping[int, Mapping[str, Any]],
) -> None:
    """Send this rank's Buffers of one name to the receivers, and copy those of all ranks into `whole`; collective."""
    described = zip(ranges, tables[transport.rank], strict=True)
    own = [one.entries[name].array.view(np.uint8) for one, sent in described if _is_sent(sent.entries.get(name))]
    joined = np.concatenate([*own, np.empty(0, np.uint8)])
    sizes = [sum(_nbytes(one, name) for one in table) for table in tables]
    received = _send(transport, Buffer(joined, "uint8"), sizes, receivers)
    if transport.rank not in receivers:
        return
    start = 0
    for one in (one for table in tables for one in table if _is_sent(one.entries.get(name))):
        target: Buffer = whole[one.tensor][name]
        stop = start + _nbytes(one, name)
        part = target.array[one.offset : one.offset + one.count]
        part.view(np.uint8)[:] = received.array[start:stop]
        start = stop


def _nbytes(one: RangeState, name: str) -> int:
    value = one.entries.get(name)
    return one.count * STORAGE[value.dtype].itemsize if isinstance(value, _Elements) else 0


def _send(transport: Transport, joined: Buffer, sizes: Sequence[int], receivers: Sequence[int]) -> Buffer:
    """Send `joined` to the receivers. sizes: number of bytes of each rank. Returns all ranks' bytes on a receiver."""
    if len(receivers) == transport.size:
        return transport.allgather(joined, sizes)
    sent = [joined.count if rank in receivers else 0 for rank in range(transport.size)]
    repeated = joined if len(receivers) == 1 else Buffer(np.tile(joined.array, len(receivers)), "uint8")
    return transport.alltoall(repeated, sent, sizes if transport.rank in receivers else [0] * transport.size)
