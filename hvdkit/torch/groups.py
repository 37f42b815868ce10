"""Gradients that are reduced together: Horovod's `groups` and `num_groups`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.engine.named.execution import split_rows


def number_groups(named: Sequence[tuple[str, torch.nn.Parameter]], groups: Any, num_groups: int) -> dict[int, int]:
    """Return the group number of each parameter that is in a group, by id() of the parameter.

    groups: a list of lists of parameters, or the number of groups to make of the trained parameters, in their order;
    None or 0 for no groups. num_groups: the older argument for their number.
    Raises ValueError, as Horovod does, for other values, and for a parameter that is in two groups.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated; pass groups=... instead.", DeprecationWarning, 4)
        groups = num_groups if groups is None else groups
    if groups is None:
        return {}
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        sizes = split_rows(len(trained), groups) if groups else []
        numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
        return {id(parameter): number for parameter, number in zip(trained, numbers, strict=False)}
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(
            f"DistributedOptimizer(): groups is {groups!r}; it must be a non-negative integer or a list of lists of "
            f"parameters."
        )
    group_of: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in named}
    for number, group in enumerate(groups):
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(
                    f"DistributedOptimizer(): groups must hold parameters; group {number} holds a "
                    f"{type(parameter).__name__}."
                )
            if id(parameter) in group_of:
                name = names.get(id(parameter), f"a tensor of shape {list(parameter.shape)}")
                raise ValueError(
                    f"DistributedOptimizer(): {name} is in group {group_of[id(parameter)]} and in group {number}. Put "
                    f"it into one group only."
                )
            group_of[id(parameter)] = number
    return group_of
