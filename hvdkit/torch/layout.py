"""The layout of parameters, on which ranks agree: name, dtype, device, and the order of elements in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.torch.tensors import dtype_name

Named = Sequence[tuple[str, torch.nn.Parameter]]


def layout_of(parameter: torch.Tensor) -> str:
    """Return the memory format of a dense parameter; "" for row-major order, and for a parameter that is not dense."""
    if parameter.is_contiguous():
        return ""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if parameter.dim() == dimensions and parameter.is_contiguous(memory_format=layout):
            return str(layout).removeprefix("torch.")
    return ""


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of a dense tensor of the parameter's layout, sorted by stride, the largest stride first."""
    strides = strides_of(parameter)
    return tuple(parameter.shape[at] for at in sorted(range(parameter.dim()), key=lambda at: -strides[at]))


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor of the parameter's layout."""
    if parameter.is_contiguous() or layout_of(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def arrange(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the tensor, or a dense copy of it, with elements in these strides."""
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def describe_parameters(named: Named, groups: Mapping[int, int]) -> list[TensorSpec]:
    """Describe the parameters for the engine's plan. groups: see number_groups. TypeError for an unsendable dtype."""
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
