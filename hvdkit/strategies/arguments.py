"""Argument checks that the strategies of this folder share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np


def check_integer(who: str, name: str, value: Any, least: int) -> None:
    """Raise TypeError for a value that is not an integer, ValueError for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{who}: {name} is {value!r}; it must be an integer.")
    if value < least:
        raise ValueError(f"{who}: {name} is {value}; it must be {least} or more.")


def refuse_arguments(who: str, others: Collection[str]) -> None:
    """Raise TypeError for arguments that require ranks to reduce gradients together."""
    if others:
        raise TypeError(
            f"{who} has no argument {', '.join(others)}. If it is misspelled, correct it. An op or a compression it "
            "cannot have, because a server averages what the ranks send, as it is: for these use "
            "hvd.DistributedOptimizer(), hvd.LocalSGD() or hvd.DiLoCo()."
        )
