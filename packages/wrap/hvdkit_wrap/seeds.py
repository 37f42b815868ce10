"""Seed all ranks alike, so that they draw the same random numbers until training begins."""

from __future__ import annotations

import random
from types import ModuleType

from hvdkit.startup.after_import import after_import


def seed_alike(seed: int) -> None:
    """Seed Python now, numpy and TensorFlow when they are imported; torch has the same default seed in each process.

    seed: of this job, the same on all ranks; a seed that the script sets itself replaces it.
    """
    random.seed(seed)

    def seed_numpy(module: ModuleType) -> None:
        module.random.seed(seed % 2**32)

    def seed_tensorflow(module: ModuleType) -> None:
        module.random.set_seed(seed)

    after_import("numpy", seed_numpy)
    after_import("tensorflow", seed_tensorflow)
