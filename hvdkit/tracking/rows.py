"""Rows of logged values, packed into an array whose sum over all ranks contains the averages."""

from __future__ import annotations

import functools
import math
import numbers
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import TrackError

Floats = NDArray[np.float64]
#: A step, and the averages of its values, by key.
Averages = tuple[int, dict[str, float]]

#: Prefix of hvdkit's own series; the script's keys must not have it.
OWN = "hvdkit/"


class Row(NamedTuple):
    """The values that this rank has logged in a step. values: numbers, or scalars on a GPU that are read later."""

    step: int
    samples: float
    values: Mapping[str, Any]


def make_row(values: Mapping[str, Any], step: int, samples: float) -> Row:
    """Check values to log, and keep their present numbers. Raises TrackError."""
    if isinstance(samples, bool) or not isinstance(samples, numbers.Real) or not 0 <= samples < math.inf:
        raise TrackError(
            f"log(): samples is {samples!r}; it must be the number of samples behind the values, 0 or more."
        )
    kept = {}
    for key, value in values.items():
        _check_key(key)
        kept[key] = value if type(value) is float else _keep(key, value)
    return Row(step, float(samples), kept)


@functools.lru_cache(maxsize=1024)  # a training has the same keys in each step
def _check_key(key: Any) -> None:
    if not isinstance(key, str) or not key.strip():
        raise TrackError(f"log(): the key {key!r} is not a name. Use strings such as 'loss'.")
    if key.startswith(OWN):
        raise TrackError(f"log(): the key {key!r} begins with {OWN!r}, as hvdkit's own series do. Rename it.")


def _keep(key: str, value: Any) -> Any:
    """Return the number; a scalar on a GPU is copied there, so that the host does not wait for the GPU each step."""
    if getattr(value, "is_cpu", True) is False and value.numel() == 1:
        return value.detach().clone()
    if getattr(value, "requires_grad", False):
        value = value.detach()  # float() of a tensor with a gradient makes torch warn
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
        raise TrackError(
            f"log(): {key!r} is a {what}, not one number. Log its mean, as in log({{{key!r}: value.mean()}})."
        ) from None


def pack_rows(rows: Iterable[Row]) -> Floats:
    """Pack each row's values times its samples, by sorted keys, and its samples."""
    packed: list[float] = []
    for row in rows:
        # The value of no samples, often nan, must not be added.
        packed += [float(row.values[key]) * row.samples if row.samples else 0.0 for key in sorted(row.values)]
        packed.append(row.samples)
    return np.array(packed, np.float64)


def unpack_rows(rows: Sequence[Row], sums: Floats) -> tuple[list[Averages], Floats]:
    """Return the averages of each row, nan if no rank has a sample, and the rest of `sums`.

    sums: of the ranks' pack_rows(), followed by other data.
    """
    found: list[Averages] = []
    at = 0
    for row in rows:
        keys = sorted(row.values)
        samples = float(sums[at + len(keys)])
        found.append((row.step, {key: _divide(float(sums[at + i]), samples) for i, key in enumerate(keys)}))
        at += len(keys) + 1
    return found, sums[at:]


def _divide(total: float, samples: float) -> float:
    return total / samples if samples else math.nan


def describe_rows(rows: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Describe the rows, which must be equal on all ranks, as (word, value) of an operation."""
    keys = sorted({key for row in rows for key in row.values})
    steps = f"{rows[0].step} to {rows[-1].step}" if rows else "none"
    # Two ranks may have the same keys and steps in different rows.
    layout = ";".join(f"{row.step}:{','.join(sorted(row.values))}" for row in rows)
    return (
        ("logged keys", ", ".join(keys)),
        ("logged steps", f"{len(rows)} ({steps})"),
        ("logged rows", f"checksum {zlib.crc32(layout.encode()):08x}"),
    )
