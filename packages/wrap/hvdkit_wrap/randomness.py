"""Random number generators: the same state on all ranks between epochs, a seed of its own on each rank in an epoch.

So numbers that a script draws between epochs (to split its data, or to initialize another model) are the same on all
ranks, and dropout, noise and augmentation differ between rows, as in one process. Rank 0 keeps the script's numbers.
"""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any


def read_states() -> dict[str, Any]:
    """Read the states of Python's generator and, if they are loaded, of numpy's and torch's (on the CPU)."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def set_states(states: dict[str, Any]) -> None:
    """Set the states that another rank has read."""
    random.setstate(states["random"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def seed_of(states: dict[str, Any], rank: int) -> int:
    """Derive a seed below 2**32 for a rank from rank 0's states."""
    found = states["torch"].numpy().tobytes() if "torch" in states else repr(states["random"]).encode()
    return zlib.crc32(rank.to_bytes(4, "little"), zlib.crc32(found))


def seed_per_rank(seed: int) -> None:
    """Seed the generators of Python and, if they are loaded, of numpy and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
