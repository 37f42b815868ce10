"""Facts as JSON and back, for agents on other hosts, which may have another version of hvdkit."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def encode(value: Any) -> dict[str, Any]:
    """Turn a dataclass into what json can write."""
    return asdict(value)


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a dataclass from what json has read; unknown fields are left out, missing ones get their defaults."""
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _build(hints[name], value) for name, value in data.items() if name in known})


def _build(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return decode(hint, value)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        inner = get_args(hint)[0]
        return tuple(_build(inner, item) for item in value)
    if get_origin(hint) in (Union, types.UnionType) and value is not None:
        return _build(next(choice for choice in get_args(hint) if choice is not type(None)), value)
    return value
