"""Steps of a training on a mesh: the time of each stage, the bubble, and exposed communication of each axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.engine.observe.recording import HEAD, PlanFacts
from hvdkit.profiling.recordings import Floats, RankRecording
from hvdkit.profiling.text import show_s

_NUMBER, _ENDED, _LOADING = (HEAD.index(word) for word in ("round", "ended", "loading_s"))
_PAUSE = 3.0  # times the median: longer steps do not count
#: The parts of a step: key -> description.
PARTS = {
    "stages": "computing in stages",
    "pp": "waiting for other stages",
    "tp": "exposed communication of tp",
    "dp": "exposed communication of dp",
    "world": "exposed communication of all",
    "loading": "waiting for data",
    "other": "everything else",
}


@dataclass(frozen=True)
class MeshStage:
    """The seconds of a step in which a stage computes, as the mean of its ranks.

    stage: number of the stage.
    ranks: its ranks in the world.
    forward_s: seconds of forward passes.
    backward_s: seconds of backward passes.
    """

    stage: int
    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeshSteps:
    """The mean step on a mesh.

    name: the mesh and the schedule.
    count: number of steps that count.
    step_s: seconds of a step.
    parts: seconds of each of PARTS, the mean of all ranks.
    ranks: the same for each rank, by its number.
    stages: the stages of the pipeline.
    ideal_bubble: fraction of a step in which the schedule is idle if stages are equal and messages take no time; None
    without a pipeline, and for zero-bubble schedules.
    """

    name: str
    count: int
    step_s: float
    parts: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]]
    stages: tuple[MeshStage, ...]
    ideal_bubble: float | None

    @property
    def bubble(self) -> float:
        """Return the fraction of a step in which a rank waits for other stages."""
        return self.parts["pp"] / self.step_s


def find_mesh_steps(recordings: Sequence[RankRecording]) -> MeshSteps | None:
    """Return the mean step on the mesh with the most steps that all ranks recorded; None for fewer than two steps."""
    names = {facts.name: len(rows) for each in recordings for facts, rows in each.plans if facts.parts}
    if not names:
        return None
    name = max(names, key=names.__getitem__)
    chosen = [
        (each.facts.rank, *max(found, key=lambda plan: len(plan[1])))
        for each in recordings
        if (found := [(facts, rows) for facts, rows in each.plans if facts.parts and facts.name == name])
    ]
    seconds = [_steps(rows) for _, _, rows in chosen]
    common = sorted(set.intersection(*(set(each) for each in seconds)))
    if not common:
        return None
    longest = np.array([max(each[number] for each in seconds) for number in common])
    usual = {number for number, step_s in zip(common, longest, strict=True) if step_s <= _PAUSE * np.median(longest)}
    ranks: dict[int, dict[str, float]] = {}
    stages: dict[int, dict[int, tuple[float, float]]] = {}
    steps_s = []
    for (rank, facts, rows), each in zip(chosen, seconds, strict=True):
        steps_s.append(float(np.mean([each[number] for number in usual])))
        means = rows[np.isin(rows[:, _NUMBER], list(usual))].mean(axis=0)
        ranks[rank] = _parts(facts, means, steps_s[-1])
        for stage, both in _stages(facts, means).items():
            stages.setdefault(stage, {})[rank] = both
    return MeshSteps(
        name,
        len(usual),
        float(np.mean(steps_s)),
        {part: float(np.mean([each[part] for each in ranks.values()])) for part in PARTS},
        ranks,
        tuple(
            MeshStage(stage, tuple(of), *(float(np.mean([both[at] for both in of.values()])) for at in (0, 1)))
            for stage, of in sorted(stages.items())
        ),
        _ideal_bubble(chosen[0][1]),
    )


def _steps(rows: Floats) -> dict[int, float]:
    """Return the seconds of each step, by number, if its start, the end of the previous step, is known."""
    pairs = itertools.pairwise(rows)
    return {
        int(new[_NUMBER]): float(new[_ENDED] - old[_ENDED]) for old, new in pairs if new[_NUMBER] == old[_NUMBER] + 1
    }


def _parts(facts: PlanFacts, row: Floats, step_s: float) -> dict[str, float]:
    found = dict.fromkeys(PARTS, 0.0)
    for part, seconds in zip(facts.parts, row[len(HEAD) :], strict=True):
        found[part if part in PARTS else "stages"] += float(seconds)
    found["loading"] = float(row[_LOADING])
    found["other"] = step_s - sum(found.values())
    return found


def _stages(facts: PlanFacts, row: Floats) -> dict[int, tuple[float, float]]:
    """Return the forward and backward seconds of each stage of this rank."""
    found: dict[int, tuple[float, float]] = {}
    for part, seconds in zip(facts.parts, row[len(HEAD) :], strict=True):
        direction, _, number = part.partition(" ")
        if number:
            forward, backward = found.get(int(number), (0.0, 0.0))
            both = (forward + seconds, backward) if direction == "forward" else (forward, backward + seconds)
            found[int(number)] = (float(both[0]), float(both[1]))
    return found


def _ideal_bubble(facts: PlanFacts) -> float | None:
    """Return the ideal bubble, (p - 1) / (v m + p - 1) (arXiv 2104.04473, section 2.2)."""
    if not facts.pipeline or any(word in facts.name for word in ("ZeroBubble", "DualPipe")):
        return None
    ranks, chunks, microbatches = facts.pipeline
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def describe_mesh_steps(steps: MeshSteps) -> str:
    """Describe the steps as text with tables."""
    return "\n".join(_list_lines(steps))


def _list_lines(steps: MeshSteps) -> Iterator[str]:
    size, took = len(steps.ranks), show_s(steps.step_s)
    yield f"{steps.name}, on {size} ranks: a step takes {took} ({steps.count} steps analysed)."
    for part, words in PARTS.items():
        if steps.parts[part] or part in ("stages", "other"):
            share = 100 * steps.parts[part] / steps.step_s
            note = f"   bubble{_ideal(steps)}" if part == "pp" else ""
            yield f"  {words:34}{show_s(steps.parts[part]):>9}  {share:3.0f} %{note}"
    if not steps.stages:
        yield "  (Without a pipeline computing is part of everything else.)"
        return
    yield "  stage  ranks               forward    backward"
    for stage in steps.stages:
        ranks = ", ".join(map(str, stage.ranks[:4])) + ", ..." * (len(stage.ranks) > 4)
        yield f"  {stage.stage:5}  {ranks:14}{show_s(stage.forward_s):>12}{show_s(stage.backward_s):>12}"
    work = {rank: parts["stages"] for rank, parts in steps.ranks.items()}
    mean, slowest = sum(work.values()) / len(work), max(work, key=work.__getitem__)
    if work[slowest] > 1.1 * mean:
        own = [str(stage.stage) for stage in steps.stages if slowest in stage.ranks]
        yield (
            f"Rank {slowest} (stage {' and '.join(own)}) computes {work[slowest] / mean:.2f} times as long as the mean "
            f"of the ranks: equal stages would save up to {show_s(work[slowest] - mean)} a step. Pass pipeline() an "
            "example of the real size, costs=, or parts= with smaller parts."
        )


def _ideal(steps: MeshSteps) -> str:
    if steps.ideal_bubble is None:
        return " and messages"
    return f" and messages; of equal stages and without messages {100 * steps.ideal_bubble:.0f} %"
