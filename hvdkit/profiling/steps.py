"""The steps that all ranks recorded, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.engine.observe.recording import HEAD, STAMPS, PlanFacts, RankFacts
from hvdkit.errors import ProfileError
from hvdkit.profiling.recordings import Floats, RankRecording

_ROUND, _FINISHING, _ENDED, _LOADING, _LOADED, _LOADERS = range(len(HEAD))
_FILLING, _READY, _HANDED, _WAITING, _REDUCED, _TAKEN = range(len(STAMPS))

_Key = tuple[str, tuple[int, ...], tuple[int, ...]]

#: Steps over which the clocks of two hosts keep their distance.
_STEADY = 51


@dataclass(frozen=True)
class Steps:
    """Rounds of one plan, each with what went before it: a step ends when its results are in place.

    ranks: R of them. numbers: of the n rounds. All else is (R, n), or (R, n, B) for B buckets; times are in seconds, on
    the clock of the first rank's host.
    loading: waited for data. extra: training stood still for other plans, in this step. loaders: processes that load,
    -1 where that is not known.
    """

    ranks: tuple[RankFacts, ...]
    plan: PlanFacts
    numbers: Floats
    began: Floats
    finishing: Floats
    ended: Floats
    loading: Floats
    loaded: Floats
    extra: Floats
    loaders: int
    filling: Floats
    ready: Floats
    handed: Floats
    waiting: Floats
    reduced: Floats
    taken: Floats

    @property
    def seconds(self) -> Floats:
        """How long each step took, (R, n)."""
        return self.ended - self.began


def find_steps(recordings: Sequence[RankRecording]) -> Steps:
    """The steps of the plan that was gone through most often (of the largest, if several were), by all its ranks.

    Raises ProfileError if there are none.
    """
    if not recordings:
        raise ProfileError("No rank recorded anything.")
    plans: dict[_Key, int] = {}
    for one in recordings:
        for facts, rows in one.plans:
            plans[_key(facts)] = max(plans.get(_key(facts), 0), len(rows))
    if not plans:
        raise ProfileError(
            f"{len(recordings)} ranks were there, and reduced no gradients. A profile is one of steps with hvdkit's "
            f"DistributedOptimizer or DistributedGradientTape, on 2 ranks or more, with hvdkit's own engine."
        )
    chosen = max(plans, key=lambda key: (plans[key], len(key[1])))
    mine = [(one, facts, rows) for one in recordings for facts, rows in one.plans if _key(facts) == chosen]
    facts = mine[0][1]
    numbers = _common([rows[:, _ROUND] for _, _, rows in mine])[1:]  # where the first of them began is not known
    if not len(numbers):
        raise ProfileError("The ranks recorded no two steps that all of them took. Let the script run longer.")
    tables = [rows[np.searchsorted(rows[:, _ROUND], numbers)] for _, _, rows in mine]
    heads = np.stack([rows[:, : len(HEAD)] for rows in tables])
    stamps = np.stack([rows[:, len(HEAD) :].reshape(len(rows), -1, len(STAMPS)) for rows in tables])
    before = np.stack([rows[np.searchsorted(rows[:, _ROUND], numbers) - 1][:, _ENDED] for _, _, rows in mine])
    shift = _line_up([one.facts.node for one, _, _ in mine], stamps[:, :, -1, _REDUCED])
    extra, loading = _others([one for one, _, _ in mine], facts, before, heads[:, :, _ENDED])
    each = {word: stamps[..., at] + shift[..., None] for at, word in enumerate(STAMPS)}
    return Steps(
        ranks=tuple(one.facts for one, _, _ in mine),
        plan=facts,
        numbers=numbers,
        began=before + shift,
        finishing=heads[:, :, _FINISHING] + shift,
        ended=heads[:, :, _ENDED] + shift,
        loading=heads[:, :, _LOADING] + loading,
        loaded=heads[:, :, _LOADED] + shift,
        extra=extra,
        loaders=int(heads[:, :, _LOADERS].max()),
        **each,
    )


def _key(facts: PlanFacts) -> _Key:
    """What tells a plan from others; one is made anew, under its name, for other parameters or tuned settings."""
    return facts.name, facts.ranks, facts.nbytes


def _common(numbers: Sequence[Floats]) -> Floats:
    """Numbers that all have, rising, without what lies before a gap."""
    found = numbers[0]
    for other in numbers[1:]:
        found = np.intersect1d(found, other)
    gaps = np.flatnonzero(np.diff(found) != 1)
    return found[gaps[-1] + 1 :] if len(gaps) else found


def _line_up(nodes: Sequence[str], done: Floats) -> Floats:
    """What to add to the times of each rank, (R, n), so that they are those of the first one's host.

    All ranks have the sum of the last bucket at the same moment, to within a message; the first of a host to see it
    stands for all of it. done: when they saw it, (R, n). The distance is steady over some steps, and noise is not.
    """
    shift = np.zeros_like(done)
    seen = {
        node: done[[at for at, one in enumerate(nodes) if one == node]].min(axis=0) for node in dict.fromkeys(nodes)
    }
    first = seen[nodes[0]]
    for at, node in enumerate(nodes):
        if node != nodes[0]:
            shift[at] = _smooth(first - seen[node])
    return shift


def _smooth(values: Floats) -> Floats:
    """A running median."""
    width = min(_STEADY, len(values) | 1)
    padded = np.pad(values, width // 2, mode="edge")
    result: Floats = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)[: len(values)]
    return result


def _others(
    recordings: Sequence[RankRecording], plan: PlanFacts, began: Floats, ended: Floats
) -> tuple[Floats, Floats]:
    """What other plans took of these steps, and the data that was waited for before their rounds, each (R, n)."""
    extra, loading = np.zeros_like(ended), np.zeros_like(ended)
    for rank, one in enumerate(recordings):
        for facts, rows in one.plans:
            if _key(facts) == _key(plan):
                continue
            at = np.searchsorted(ended[rank], rows[:, _ENDED])
            inside = (at < len(ended[rank])) & (rows[:, _ENDED] > began[rank, 0])
            stamps = rows[:, len(HEAD) :].reshape(len(rows), -1, len(STAMPS))
            stood = (stamps[..., _HANDED] - stamps[..., _FILLING] + stamps[..., _TAKEN] - stamps[..., _WAITING]).sum(
                axis=1
            )
            np.add.at(extra[rank], at[inside], stood[inside])
            np.add.at(loading[rank], at[inside], rows[inside, _LOADING])
    return extra, loading
