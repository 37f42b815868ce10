"""Decide whether a job that has ended is restarted, on how many ranks and without which hosts; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.launch.plan.job import name_host
from hvdkit.launch.state.outcome import JobResult, Outcome
from hvdkit.launch.state.ranks import Ranks

#: A job is given up after so many attempts in a row that saved nothing: the next attempt would end in the same way.
MAX_ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class RestartPolicy:
    """The conditions for a restart of a job."""

    min_ranks: int
    max_ranks: int
    max_restarts: int | None = None  # None for any number
    wait_s: float = 600.0  # for slots, while they are fewer than min_ranks
    ranks_survive: bool = False  # ranks continue when others die: only the loss of the whole job leads to a restart
    checkpoints: str = ""  # the folder where ranks keep commits; "" for none
    discovers: bool = False  # a script finds the hosts, so an unreachable host is not a mistake of the user


@dataclass(frozen=True)
class Attempt:
    """One run of the job."""

    result: JobResult
    joined: bool = False  # all ranks had joined each other
    checkpointed: bool = False  # some of the training was saved to a disk
    asked_to_save: bool = False  # hvdrun made it save and end, because other hosts were found


def give_up_reason(attempts: Sequence[Attempt], policy: RestartPolicy) -> str | None:
    """Explain why a job is not restarted after these attempts; None if it is, "" if the last result explains it."""
    last, restarts = attempts[-1], len(attempts) - 1
    outcome = last.result.outcome
    restartable = (
        outcome is Outcome.RANK_DIED
        or (outcome is Outcome.SAVED and last.asked_to_save)
        or (outcome is Outcome.MISSING_RANKS and (restarts > 0 or policy.discovers))
    )
    if not restartable:
        return ""
    resumes = bool(policy.checkpoints) and any(attempt.joined for attempt in attempts)
    if policy.ranks_survive and outcome is Outcome.RANK_DIED and not resumes:
        return ""
    if policy.max_restarts is not None and restarts >= policy.max_restarts:
        return f"not started again: it was restarted {restarts} time{'s' * (restarts != 1)}, the limit (--reset-limit)."
    if attempts_without_progress(attempts) >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
        return (
            f"not started again: {MAX_ATTEMPTS_WITHOUT_PROGRESS} attempts in a row ended before a checkpoint was "
            "saved. Save with hvd.checkpoint or with --elastic-checkpoints FOLDER, or find out why ranks die."
        )
    return None


def attempts_without_progress(attempts: Sequence[Attempt]) -> int:
    """Count the attempts, up to the last one, that saved nothing."""
    return next((at for at, attempt in enumerate(reversed(attempts)) if attempt.checkpointed), len(attempts))


def choose_ranks(slots: int | None, policy: RestartPolicy) -> int:
    """Choose the number of ranks for these slots; 0 if the slots are too few. slots: None for any number."""
    ranks = policy.max_ranks if slots is None else min(policy.max_ranks, slots)
    return ranks if ranks >= policy.min_ranks else 0


def find_lost_hosts(ranks: Ranks, outcome: Outcome, planned: Sequence[tuple[str, int]]) -> set[str]:
    """Find the lost hosts of an attempt, and those on which no rank started although ranks on others did.

    Returns their planned names. planned: (host, ranks on it) in the order of ranks; () if it is unknown: then the
    names are those that the hosts report.
    """
    reported = {rank: state.host for rank, state in ranks.states.items() if state.host}
    if outcome is Outcome.MISSING_RANKS:
        missing = {name_host(rank, {}, planned) for rank in ranks.expected - ranks.hosts.keys()}
        present = {name_host(rank, reported, planned) for rank in ranks.hosts}
        return missing - present - {""} if present else set()
    return {name_host(rank, reported, planned) for rank, host in reported.items() if host in ranks.lost_hosts}
