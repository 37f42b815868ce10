"""Comparison of a sharded checkpoint's tensors with those that the model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Shapes = Mapping[str, Sequence[int]]
_SHOWN = 3


def describe_difference(needed: Shapes, saved: Shapes) -> str:
    """Describe how the tensors of a training differ from those of a checkpoint; "" for equal ones. Shapes by name."""
    missing = [name for name in needed if name not in saved]
    unexpected = [name for name in saved if name not in needed]
    unequal = [name for name in needed if name in saved and tuple(needed[name]) != tuple(saved[name])]
    parts = []
    if missing:
        parts.append(f"it lacks {_show(missing)}")
    if unexpected:
        parts.append(f"it has {_show(unexpected)} besides")
    if unequal:
        shapes = [f"{name} with shape {list(saved[name])}, here {list(needed[name])}" for name in unequal]
        parts.append(f"it has {_show(shapes)}")
    return "; ".join(parts)


def _show(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
