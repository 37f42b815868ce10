"""What is said of a rank that others wait for and that is no more there, whoever noticed it."""

from __future__ import annotations


def describe_death(rank: int, host: str) -> str:
    """For a process that ended without a word. rank: in the whole world."""
    return (
        f"Rank {rank} on host {host} has died (killed, crashed or out of memory); its own output, or the system's log, "
        f"says why."
    )


def describe_leaving(rank: int, host: str, waiting: int) -> str:
    """For a rank that said that it takes no further part. waiting: the rank that waits for it."""
    return (
        f"Rank {rank} on host {host} has shut hvdkit down (or reached the end of its script) while rank {waiting} "
        f"still waits for it. Give every rank the same number of steps."
    )
