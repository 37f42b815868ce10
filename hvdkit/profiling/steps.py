"""Finds the steps that all ranks recorded, and converts their times to one clock."""

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

#: Number of steps over which the offset between the clocks of two hosts counts as constant.
_STEADY = 51


@dataclass(frozen=True)
class Steps:
    """The rounds of one plan as steps: a step begins at the end of the previous step, and ends with its results.

    Times are in seconds, on the clock of the first rank's host; arrays are (R, n), or (R, n, B) for B buckets. See
    HEAD and STAMPS in engine/observe/recording.py.

    ranks: the R ranks.
    plan: the plan.
    numbers: (n,), the numbers of the rounds.
    began: start of the step.
    finishing: time at which backward had ended.
    ended: end of the step.
    loading: seconds of waiting for data.
    loaded: end of the last wait for data.
    extra: seconds in which training waited for other plans.
    loaders: number of processes that load data, -1 if unknown.
    filling: (R, n, B), start of filling the bucket.
    ready: (R, n, B), end of filling.
    handed: (R, n, B), time at which the transport has started the bucket.
    waiting: (R, n, B), time at which training begins to wait for it.
    reduced: (R, n, B), time at which training finds it reduced.
    taken: (R, n, B), time at which its results are copied out.
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
        """Return the duration of each step, (R, n)."""
        return self.ended - self.began


def find_steps(recordings: Sequence[RankRecording]) -> Steps:
    """Return the steps of the plan with the most rounds; among equals, with the most ranks, then the most bytes.

    Raises ProfileError if there are no steps that all ranks of the plan recorded.
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
    numbers = _common([rows[:, _ROUND] for _, _, rows in mine])[1:]  # the start of the first step is unknown
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
    """Return the recording without steps on a mesh: see mesh_steps.py."""
    return RankRecording(recording.facts, [(facts, rows) for facts, rows in recording.plans if not facts.parts])


def _key(facts: PlanFacts) -> _Key:
    """Return a key of a plan, because a plan of other parameters or tuned settings may have the same name."""
    return facts.name, facts.ranks, facts.nbytes


def _common(numbers: Sequence[Floats]) -> Floats:
    """Return the numbers in all arrays, in rising order, after the last gap."""
    common = numbers[0]
    for other in numbers[1:]:
        common = np.intersect1d(common, other)
    gaps = np.flatnonzero(np.diff(common) != 1)
    return common[gaps[-1] + 1 :] if len(gaps) else common


def _line_up(nodes: Sequence[str], done: Floats) -> Floats:
    """Return the offset, (R, n), from each rank's clock to the clock of the first rank's host.

    All ranks get the sum of the last bucket at the same time, to within the time of a message; of each host the first
    rank to get it counts. A running median removes noise.
    nodes: of each rank, equal for ranks with the same clock. done: that time on each rank's clock, (R, n).
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
    """Return the running median of the values."""
    width = min(_STEADY, len(values) | 1)
    padded = np.pad(values, width // 2, mode="edge")
    result: Floats = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)[: len(values)]
    return result


def _others(
    recordings: Sequence[RankRecording], plan: PlanFacts, began: Floats, ended: Floats
) -> tuple[Floats, Floats]:
    """Return the seconds of these steps in other plans, and in waits for data before those plans' rounds, (R, n)."""
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
