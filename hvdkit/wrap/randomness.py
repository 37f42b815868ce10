"""Random numbers: the ranks agree on them between epochs, and each has its own while it trains.

So what a script draws between epochs (a split of its data, the weights of another model) is the same on all ranks, and
dropout, noise and augmentation of different rows differ, as they would in one process. Rank 0's are the script's own.
"""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any


def read_states() -> dict[str, Any]:
    """The states of Python's, numpy's (if it is loaded) and torch's generators (if it is; the CPU's)."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def put_states(states: dict[str, Any]) -> None:
    """Take over the states that another rank has read."""
    random.setstate(states["random"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def seed_of(states: dict[str, Any], rank: int) -> int:
    """A seed of a rank's own, below 2**32, that follows from rank 0's states."""
    found = states["torch"].numpy().tobytes() if "torch" in states else repr(states["random"]).encode()
    return zlib.crc32(rank.to_bytes(4, "little"), zlib.crc32(found))


def go_own_way(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
