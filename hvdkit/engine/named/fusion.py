"""Several small allreduces as one: which, and where each lies in the common buffer; the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A tensor to be reduced. kind: what fused parts must have in common (dtype, op, factors). nbytes: its size."""

    kind: tuple[object, ...]
    nbytes: int


def plan_fusion(parts: Sequence[Part], limit_bytes: int) -> list[list[int]]:
    """Group parts of one kind, in order, up to `limit_bytes` a group; a larger part is alone.

    Groups come in the order of their first part.
    """
    groups: list[list[int]] = []
    filling: dict[tuple[object, ...], tuple[list[int], int]] = {}
    for index, part in enumerate(parts):
        group, size = filling.get(part.kind, ([], 0))
        if not group or size + part.nbytes > limit_bytes:
            group, size = [], 0
            groups.append(group)
        group.append(index)
        filling[part.kind] = (group, size + part.nbytes)
    return groups
