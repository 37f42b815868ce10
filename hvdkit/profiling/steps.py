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
    """The rounds of one plan as steps: a step begins where the one before ends, and ends with its results in place.

    ranks: R of them. numbers: of the n rounds. The other arrays are (R, n), or (R, n, B) for B buckets; times are in
    seconds, on the clock of the first rank's host.
    loading: seconds of waiting for data. extra: seconds in which training stood still for other plans. loaders: number
    of processes that load data, -1 if that is not known.
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
        """The duration of each step, (R, n)."""
        return self.ended - self.began


def find_steps(recordings: Sequence[RankRecording]) -> Steps:
    """The steps of the plan with the most rounds, the most ranks and the most bytes, in this order, of all its ranks.

    Raises ProfileError if there are none.
    """
    if not recordings:
        raise ProfileError(
            "No rank sent a recording. Check that the script calls hvd.init(), and that the hosts of the ranks can "
            "connect to this host over TCP."
        )
    recordings = [_of_gradients(recording) for recording in recordings]
    plans: dict[_Key, int] = {}
    for recording in recordings:
        for facts, rows in recording.plans:
            plans[_key(facts)] = max(plans.get(_key(facts), 0), len(rows))
    if not plans:
        raise ProfileError(
            f"{len(recordings)} ranks sent a recording, but they reduced no gradients. A profile needs steps with "
            f"hvdkit's DistributedOptimizer or DistributedGradientTape, 2 ranks or more, and hvdkit's own engine."
        )
    chosen = max(plans, key=lambda key: (plans[key], len(key[1]), sum(key[2])))
    mine = [(each, facts, rows) for each in recordings for facts, rows in each.plans if _key(facts) == chosen]
    facts = mine[0][1]
    numbers = _common([rows[:, _ROUND] for _, _, rows in mine])[1:]  # the beginning of the first one is not known
    if not len(numbers):
        raise ProfileError("There are fewer than two steps that all ranks have recorded. Let the script run longer.")
    tables = [rows[np.searchsorted(rows[:, _ROUND], numbers)] for _, _, rows in mine]
    heads = np.stack([rows[:, : len(HEAD)] for rows in tables])
    stamps = np.stack([rows[:, len(HEAD) :].reshape(len(rows), -1, len(STAMPS)) for rows in tables])
    before = np.stack([rows[np.searchsorted(rows[:, _ROUND], numbers) - 1][:, _ENDED] for _, _, rows in mine])
    shift = _line_up([recording.facts.node for recording, _, _ in mine], stamps[:, :, -1, _REDUCED])
    extra, loading = _others([recording for recording, _, _ in mine], facts, before, heads[:, :, _ENDED])
    each = {word: stamps[..., at] + shift[..., None] for at, word in enumerate(STAMPS)}
    return Steps(
        ranks=tuple(recording.facts for recording, _, _ in mine),
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


def _of_gradients(recording: RankRecording) -> RankRecording:
    """Without steps on a mesh: see mesh_steps.py."""
    return RankRecording(recording.facts, [(facts, rows) for facts, rows in recording.plans if not facts.parts])


def _key(facts: PlanFacts) -> _Key:
    """The identity of a plan: a plan of other parameters or tuned settings may have the same name."""
    return facts.name, facts.ranks, facts.nbytes


def _common(numbers: Sequence[Floats]) -> Floats:
    """The numbers that all arrays have, rising, after the last gap."""
    common = numbers[0]
    for other in numbers[1:]:
        common = np.intersect1d(common, other)
    gaps = np.flatnonzero(np.diff(common) != 1)
    return common[gaps[-1] + 1 :] if len(gaps) else common


def _line_up(nodes: Sequence[str], done: Floats) -> Floats:
    """The offset, (R, n), from each rank's clock to that of the first rank's host.

    All ranks have the sum of the last bucket at the same time, to within a message; of each host the first rank counts.
    done: the time of that on each rank's clock, (R, n). A running median removes noise.
    """
    shift = np.zeros_like(done)
    by_node = {
        node: done[[rank for rank, own in enumerate(nodes) if own == node]].min(axis=0) for node in dict.fromkeys(nodes)
    }
    first = by_node[nodes[0]]
    for at, node in enumerate(nodes):
        if node != nodes[0]:
            shift[at] = _smooth(first - by_node[node])
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
    """Seconds of these steps in other plans, and of waiting for data before their rounds, each (R, n)."""
    extra, loading = np.zeros_like(ended), np.zeros_like(ended)
    for rank, recording in enumerate(recordings):
        for facts, rows in recording.plans:
            if _key(facts) == _key(plan):
                continue
            at = np.searchsorted(ended[rank], rows[:, _ENDED])
            inside = (at < len(ended[rank])) & (rows[:, _ENDED] > began[rank, 0])
            stamps = rows[:, len(HEAD) :].reshape(len(rows), -1, len(STAMPS))
            seconds = (stamps[..., _HANDED] - stamps[..., _FILLING] + stamps[..., _TAKEN] - stamps[..., _WAITING]).sum(
                axis=1
            )
            np.add.at(extra[rank], at[inside], seconds[inside])
            np.add.at(loading[rank], at[inside], rows[inside, _LOADING])
    return extra, loading
