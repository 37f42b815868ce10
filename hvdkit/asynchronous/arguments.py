"""What strategies of this folder refuse alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from hvdkit.engine.groups import Group
from hvdkit.engine.strategy import on_horovod
from hvdkit.transport.buffer import COMPLEX


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


def check_real(who: str, what: str, dtype: str) -> None:
    """Raise TypeError for a parameter, described by `what`, of a complex dtype."""
    if dtype in COMPLEX:
        raise TypeError(f"{what} has dtype {dtype}, which {who} cannot train. Use real numbers.")


def refuse_join(who: str, strategy: object, group: Group) -> None:
    """Have hvd.join() refused as long as the strategy is there, or until allow_join()."""
    group.engine.joining.refusals[strategy] = (
        f"{who} waits for every rank in its steps. Call optimizer.finish() on all ranks after their last step, in "
        "place of hvd.join()."
    )


def allow_join(strategy: object, group: Group) -> None:
    """Take back refuse_join()."""
    group.engine.joining.refusals.pop(strategy, None)


def need_messages(who: str) -> None:
    """Raise ValueError where the engine has no messages from rank to rank."""
    if on_horovod():
        raise ValueError(
            f"{who} needs the native engine: Horovod's core has no messages from rank to rank. Set "
            "HVDKIT_ENGINE=native."
        )
