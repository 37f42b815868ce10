"""The state of a sharded optimizer as tensors: to and from the Buffers in which it is gathered, and cut into slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.torch.layout import arrange
from hvdkit.torch.tensors import as_buffer, as_tensor
from hvdkit.transport.buffer import Buffer

#: An optimizer's state of a parameter, by name: tensors of its shape, other tensors, numbers.
State = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """The shape and strides of a parameter when it was divided; its memory may have another order now."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


def to_buffers(state: State, count: int) -> dict[str, Any]:
    """Return the state of a slice for RangeState: its elementwise tensors as Buffers, all others in host memory.

    state: of the slice.
    count: number of its elements.
    """
    entries: dict[str, Any] = {}
    for name, value in state.items():
        host = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        entries[name] = as_buffer(host.contiguous()) if is_elementwise(name, value, (count,)) else host
    return entries


def from_buffers(entries: State, layout: Layout) -> dict[str, Any]:
    """Return a parameter's whole state in its layout, sharing memory with the Buffers of gather_state()."""
    return {
        name: as_tensor(value).as_strided(layout.shape, layout.strides) if isinstance(value, Buffer) else value
        for name, value in entries.items()
    }


def cut_state(state: State, layout: Layout, segment: TensorRange) -> dict[str, Any]:
    """Return a slice of a parameter's whole state, in new memory.

    state: the whole state.
    layout: of the parameter.
    segment: the elements of the slice.
    """
    cut = {}
    for name, value in state.items():
        if is_elementwise(name, value, layout.shape):
            cut[name] = flatten(value, layout.strides)[segment.elements].clone()
        else:
            cut[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut


def find_flaw(state: State, shape: tuple[int, ...], kinds: Mapping[str, str]) -> str:
    """Find why a parameter's whole state cannot be divided; "" if it can.

    The answer is the same on all ranks, whichever elements they have.

    shape: of the parameter.
    kinds: of the entries that the optimizer needs, see find_entries(); empty if they are unknown.
    """
    present = {name: value for name, value in state.items() if value is not None}
    for name, value in present.items():
        kind = kinds.get(name, "")
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                return f"has {name!r} of the layout {value.layout} in place of a dense tensor"
            if kind == "number" or name == "step":
                if value.numel() != 1:
                    return f"has {name!r} of shape {list(value.shape)} in place of one number"
            elif tuple(value.shape) != shape and (kind == "elementwise" or value.numel() > 1):
                return f"has {name!r} of shape {list(value.shape)} in place of {list(shape)}"
        elif kind == "elementwise":
            return f"has {name!r} of type {type(value).__name__} in place of a tensor of shape {list(shape)}"
        elif kind == "number" and not isinstance(value, (int, float)):
            return f"has {name!r} of type {type(value).__name__} in place of a number"
    missing = [name for name in kinds if name not in present]
    return f"has no {', '.join(map(repr, missing))}" if missing else ""


def with_tensors(state: State, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return a parameter's state with tensors for numbers that the optimizer keeps in tensors, as torch loads them.

    Old versions of torch counted steps in integers. kinds: see find_flaw().
    """
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return {
        name: torch.tensor(float(value), dtype=dtype)
        if kinds.get(name) == "number" and isinstance(value, (int, float))
        else value
        for name, value in state.items()
    }


def is_elementwise(name: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an entry of a state has the tensor's elements; "step" is a counter, whatever its shape."""
    return isinstance(value, torch.Tensor) and name != "step" and tuple(value.shape) == shape


def flatten(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return a dense tensor as (n,) in memory order. strides: of the memory; a copy if they differ."""
    if strides is not None:
        tensor = arrange(tensor, strides)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
