"""A job that ends: is it started again, and on how many ranks? Decided from what is known of it; nothing is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdkit.launch.ranks import Ranks
from hvdkit.launch.verdict import How, Verdict

#: Lives in a row in which nothing was saved, after which it is given up: what ended them would come again.
MOST_IN_VAIN = 3


@dataclass(frozen=True)
class Terms:
    """On which terms a job is started again.

    least: ranks with which it goes on at least. most: that it is given if there are slots.
    limit: how often; None for any number. wait_s: for slots, if there are fewer than `least`.
    outlives: its ranks go on within the job when others die, and only one that is lost as a whole is started again.
    saves: ranks keep commits on a disk. varies: a script finds the hosts, so one that is not there is no mistake.
    """

    least: int
    most: int
    limit: int | None = None
    wait_s: float = 600.0
    outlives: bool = False
    saves: bool = False
    varies: bool = False


@dataclass(frozen=True)
class Life:
    """One time that the job ran.

    begun: all ranks had met. kept: something of the training has been brought to a disk. asked: hvdrun had it save and
    end, as there are other hosts now.
    """

    verdict: Verdict
    begun: bool = False
    kept: bool = False
    asked: bool = False


def why_not_again(lives: Sequence[Life], terms: Terms) -> str | None:
    """Why a job is not started again after these lives; "" if its last verdict says all. None: it is started again."""
    last, restarts = lives[-1], len(lives) - 1
    how = last.verdict.how
    if not (how is How.DIED or (how is How.SAVED and last.asked) or (how is How.ABSENT and (restarts or terms.varies))):
        return ""
    if terms.outlives and how is How.DIED and not (terms.saves and any(life.begun for life in lives)):
        return ""
    if terms.limit is not None and restarts >= terms.limit:
        return f"it was started again {restarts} time{'s' * (restarts != 1)}, and not more often (--reset-limit)."
    if count_in_vain(lives) >= MOST_IN_VAIN:
        return (
            f"{MOST_IN_VAIN} times in a row it ended before anything was saved: it is not started again. Save with "
            f"hvd.checkpoint, or commit to --elastic-checkpoints FOLDER; else look at why ranks die."
        )
    return None


def count_in_vain(lives: Sequence[Life]) -> int:
    """How many lives, up to the last one, have brought nothing to a disk."""
    return next((at for at, life in enumerate(reversed(lives)) if life.kept), len(lives))


def choose_ranks(room: int | None, terms: Terms) -> int:
    """How many ranks the job is given; 0 if there is no room for the least. room: slots; None for any number."""
    ranks = terms.most if room is None else min(terms.most, room)
    return ranks if ranks >= terms.least else 0


def find_lost_hosts(ranks: Ranks, how: How, planned: Sequence[tuple[str, int]]) -> set[str]:
    """The hosts of a life, under their planned names, that are lost, or have sent no rank though others have.

    planned: (host, ranks on it) in the order of ranks; () if that is not known: then hosts have their own names.
    """
    reported = {**ranks.gone, **ranks.hosts}
    if how is How.ABSENT:
        missing = {name_host(rank, {}, planned) for rank in ranks.expected - ranks.hosts.keys()}
        there = {name_host(rank, reported, planned) for rank in ranks.hosts}
        return missing - there - {""} if there else set()
    return {name_host(rank, reported, planned) for rank, host in reported.items() if host in ranks.lost_hosts}


def name_host(rank: int, reported: Mapping[int, str], planned: Sequence[tuple[str, int]]) -> str:
    """What a rank's host is called in the plan, or by itself; "" if neither is known."""
    names = [name for name, count in planned for _ in range(count)]
    return names[rank] if rank < len(names) else reported.get(rank, "")
