"""The end of a job that was asked to end: saved on all ranks, or an error on all."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NoReturn

from hvdkit.checkpoint.agreement import Agreed
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.errors import CheckpointError, Preempted
from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.log import logger


def end_saved(agreed: Agreed, save: Callable[[], None]) -> NoReturn:
    """Save and raise Preempted, on all ranks; CheckpointError on all if it cannot be saved.

    agreed: which signal came to whom. save: returns when all is on the disk; collective.
    """
    problem = ""
    try:
        save()
    except CheckpointError as error:  # on rank 0, and the others wait for it
        problem = str(error)
    problem = broadcast_object(problem, name="checkpoint")
    name = signal.Signals(agreed.signal).name
    if problem:
        raise CheckpointError(f"{name} came to rank {agreed.rank}, and this could not be saved: {problem}")
    if engine.runtime("a checkpoint").world.rank == 0:
        logger.warning(
            "%s came to rank %d: saved, and ending with exit code %d; the same command goes on from here",
            name,
            agreed.rank,
            TRY_AGAIN,
        )
    raise Preempted  # signals are heard to the very end: some come twice
