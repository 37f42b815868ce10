"""What strategies of this folder refuse alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np


def check_integer(who: str, name: str, value: Any, least: int) -> None:
    """Raise TypeError for what is no integer, ValueError for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{who}: {name} is {value!r}; it must be an integer.")
    if value < least:
        raise ValueError(f"{who}: {name} is {value}; it must be {least} or more.")


def refuse_arguments(who: str, others: Collection[str]) -> None:
    """Raise TypeError for arguments that only optimizers have whose ranks reduce gradients together."""
    if others:
        raise TypeError(
            f"{who} has no argument {', '.join(others)}: a server averages what the ranks send, as it is. Leave that "
            "out; for another op or a compression use hvd.DistributedOptimizer(), hvd.LocalSGD() or hvd.DiLoCo()."
        )
