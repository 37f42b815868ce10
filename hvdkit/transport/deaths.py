"""What is said of a rank that others wait for and that is no more there, whoever noticed it."""

from __future__ import annotations

from hvdkit.world import label_rank


def describe_death(rank: int, host: str, job_rank: int | None = None) -> str:
    """For a process that ended without a word. rank: in the whole world. job_rank: see World."""
    return (
        f"Rank {label_rank(rank, job_rank)} on host {host} has died (killed, crashed or out of memory); its own "
        f"output, or the system's log, says why."
    )


def describe_leaving(rank: int, host: str, waiting: int, job_rank: int | None = None) -> str:
    """For a rank that said that it takes no further part.

    waiting: the rank that waits for it. job_rank: see World.
    """
    return (
        f"Rank {label_rank(rank, job_rank)} on host {host} has shut hvdkit down (or reached the end of its script) "
        f"while rank {waiting} still waits for it. Give every rank the same number of steps."
    )
