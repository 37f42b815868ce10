"""Reads and sets the state of Python's and numpy's random generators, as JSON; each rank has its own."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np


def read_random() -> dict[str, Any]:
    """Return the state of this process's generators."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, encode(np.array(words, np.uint32)), gauss],
        "numpy": [encode(np.asarray(keys, np.uint32)), int(position), int(has_gauss), float(cached)],
    }


def set_random(state: dict[str, Any]) -> None:
    """Set the generators to a state of read_random()."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(decode(words, np.uint32).tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", decode(keys, np.uint32), position, has_gauss, cached))


def encode(array: np.ndarray[Any, Any]) -> str:
    """Encode the array's bytes as text (base64)."""
    return base64.b64encode(array.tobytes()).decode()


def decode(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    """Return the array, (n,) of this dtype, whose bytes encode() has encoded."""
    return np.frombuffer(base64.b64decode(text), dtype).copy()
