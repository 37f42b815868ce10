"""The layout of parameters that ranks agree on: name, dtype, device, and the order of elements in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.torch.tensors import dtype_name

Named = Sequence[tuple[str, torch.nn.Parameter]]


def layout_of(parameter: torch.Tensor) -> str:
    """The memory format of a dense parameter; "" for row by row, and for what is not dense."""
    if parameter.is_contiguous():
        return ""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if parameter.dim() == dimensions and parameter.is_contiguous(memory_format=layout):
            return str(layout).removeprefix("torch.")
    return ""


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a dense tensor of the parameter's layout, those with the largest strides first."""
    strides = strides_of(parameter)
    return tuple(parameter.shape[at] for at in sorted(range(parameter.dim()), key=lambda at: -strides[at]))


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor of the parameter's layout."""
    if parameter.is_contiguous() or layout_of(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def arrange(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor, or a dense copy of it, whose elements have these strides."""
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def describe_parameters(named: Named, groups: Mapping[int, int]) -> list[TensorSpec]:
    """The parameters as the engine plans them. groups: see number_groups. TypeError for a dtype that is not sent."""
    devices = list(dict.fromkeys(parameter.device for _, parameter in named))
    return [
        TensorSpec(
            name,
            parameter.numel(),
            dtype_name(parameter),
            devices.index(parameter.device),
            layout_of(parameter),
            groups.get(id(parameter)),
            shape_of(parameter),
        )
        for name, parameter in named
    ]
