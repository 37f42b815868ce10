"""Ranks draw the same random numbers until training begins, also where the script seeds nothing."""

from __future__ import annotations

import random
from types import ModuleType

from hvdkit.startup.after_import import after_import


def seed_alike(seed: int) -> None:
    """Seed Python, and numpy and TensorFlow when they are there; torch begins with the same number by itself.

    seed: of this job, the same on all ranks; what the script seeds itself counts.
    """
    random.seed(seed)

    def seed_numpy(module: ModuleType) -> None:
        module.random.seed(seed % 2**32)

    def seed_tensorflow(module: ModuleType) -> None:
        module.random.set_seed(seed)

    after_import("numpy", seed_numpy)
    after_import("tensorflow", seed_tensorflow)
