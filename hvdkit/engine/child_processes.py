"""Refuses init() in child processes of a rank: they have the rank's variables, but its ranks are connected already.

The inherited variables alone do not identify such a child, because many ranks are children of a process with the same
variables: a shell script, or a program that prepares the rank. So init() sets a variable of its own, which only later
children inherit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hvdkit.errors import WorldError
from hvdkit.world import World, read_world

#: Variable with the id of the rank's process, and the rank's job.
_RANK_PROCESS = "HVDKIT_RANK_PROCESS"
#: Variables that differ between the rank's job and a job that the rank starts, with any launcher.
_NAMES_OF_JOBS = (
    *("HVDKIT_JOB", "PMIX_NAMESPACE", "PMI_FD", "PMI_PORT", "SLURM_STEP_ID", "PALS_APID", "JSM_JSRUN_STEP_ID"),
    *("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)


def mark_rank_process(world: World) -> None:
    """Mark this process as the rank, for child processes that start from now on."""
    if world.size > 1:
        os.environ[_RANK_PROCESS] = f"{os.getpid()} {_name_job()}"


def unmark_rank_process() -> None:
    """Remove the mark, so that a child process may call init() as this rank."""
    os.environ.pop(_RANK_PROCESS, None)


def refuse_child_of_rank(launched: World) -> None:
    """Raise WorldError in a child process of a rank. launched: the world according to its variables."""
    if launched.size < 2:
        return
    if _is_importing_again() and _parents_rank() == launched.rank:
        raise WorldError(
            f"init() was called in a child process of rank {launched.rank}, which imports the script again: the "
            "methods spawn and forkserver of multiprocessing do so, also for the workers of a DataLoader. Put the "
            "script's code into a function, and call it under: if __name__ == '__main__':"
        )
    process, _, job = os.environ.get(_RANK_PROCESS, "").partition(" ")
    if process not in ("", str(os.getpid())) and job == _name_job():
        raise WorldError(
            f"init() was called in process {os.getpid()}, which rank {launched.rank} (process {process}) has started "
            f"after its own init(). It has the rank's variables, but the {launched.size} ranks have met already, and "
            "would never answer it. If it is to train or evaluate alone, start it as a job of its own: hvdrun -np 1 "
            "SCRIPT. If it is to use several ranks, all of them must run its code: import it, and call it there."
        )


def _name_job() -> str:
    return ",".join(os.environ.get(name, "") for name in _NAMES_OF_JOBS)


def _is_importing_again() -> bool:
    """Return whether multiprocessing is importing the parent's script; its own check uses `_inheriting` too."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and getattr(multiprocessing.current_process(), "_inheriting", False)


def _parents_rank() -> int | None:
    """Return the rank in the parent process's variables; None if they cannot be read or name no rank of several.

    A parent that is not a rank may start ranks by multiprocessing.
    """
    try:
        text = os.fsdecode(Path(f"/proc/{os.getppid()}/environ").read_bytes())
        world = read_world(dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry))
    except (OSError, WorldError):
        return None
    return world.rank if world.size > 1 else None
