"""The random numbers of Python and numpy, as JSON: they are different on every rank."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np


def read_random() -> dict[str, Any]:
    """Where the generators of this process are."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, encode(np.array(words, np.uint32)), gauss],
        "numpy": [encode(np.asarray(keys, np.uint32)), int(position), int(has_gauss), float(cached)],
    }


def set_random(state: dict[str, Any]) -> None:
    """Go on from where read_random() was."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(decode(words, np.uint32).tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", decode(keys, np.uint32), position, has_gauss, cached))


def encode(array: np.ndarray[Any, Any]) -> str:
    """Numbers as text."""
    return base64.b64encode(array.tobytes()).decode()


def decode(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    """The numbers, (n,), of this dtype."""
    return np.frombuffer(base64.b64decode(text), dtype).copy()
