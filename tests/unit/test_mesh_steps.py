"""Where the time of a step on a mesh goes: what the numbers of the ranks come to."""

from __future__ import annotations

import numpy as np
import pytest

from hvdkit.engine.observe.recording import PlanFacts, RankFacts
from hvdkit.errors import ProfileError
from hvdkit.profiling.mesh_steps import describe_mesh_steps, find_mesh_steps
from hvdkit.profiling.recordings import RankRecording
from hvdkit.profiling.steps import find_steps

STEP, FORWARD, BACKWARD, DATA = 0.1, 0.01, 0.02, 0.005


def recordings(pp: int, dp: int, *, slow: float = 1.0, pauses: tuple[int, ...] = ()) -> list[RankRecording]:
    """20 steps of a pipeline, whose last stage takes `slow` times as long. pauses: steps that take ten times that."""
    found = []
    for rank in range(pp * dp):
        stage = rank // dp
        times = slow if stage == pp - 1 else 1.0
        parts = (f"forward {stage}", f"backward {stage}", "pp", "dp")
        name = f"Mesh(dp={dp}, tp=1, pp={pp}), 1F1B, 4 micro-batches"
        facts = PlanFacts(name, tuple(range(pp * dp)), (), (), (), False, parts, (pp, 1, 4))
        ended, rows = 0.0, []
        for number in range(1, 22):
            ended += STEP * (10 if number in pauses else 1)
            work = FORWARD * times + BACKWARD * times
            waits = STEP - DATA - work - 0.02, 0.01
            rows.append([number, ended, ended, DATA, 0, 0, FORWARD * times, BACKWARD * times, *waits])
        rank_facts = RankFacts(rank, pp * dp, "host", "node", "shared_memory", 1.0, 0)
        found.append(RankRecording(rank_facts, [(facts, np.array(rows))]))
    return found


def test_the_parts_of_a_step_are_those_of_the_ranks() -> None:
    steps = find_mesh_steps(recordings(2, 2, pauses=(7,)))
    assert steps is not None and steps.count == 19, "the first has no begin, and the pause does not count"
    assert steps.step_s == pytest.approx(STEP) and sum(steps.parts.values()) == pytest.approx(STEP)
    assert steps.parts["stages"] == pytest.approx(0.03) and steps.parts["other"] == pytest.approx(0.01)
    assert steps.bubble == pytest.approx(0.45)
    assert steps.ideal_bubble == pytest.approx(1 / 5)
    assert [(each.stage, each.ranks) for each in steps.stages] == [(0, (0, 1)), (1, (2, 3))]
    text = describe_mesh_steps(steps)
    assert "45 %   bubble and messages; of equal stages and without messages 20 %" in text
    assert "equal stages would save" not in text


def test_a_slow_stage_is_named_with_what_it_costs() -> None:
    steps = find_mesh_steps(recordings(2, 1, slow=2.0))
    assert steps is not None
    assert [each.forward_s for each in steps.stages] == pytest.approx([0.01, 0.02])
    # 60 ms, and 30 on the other rank.
    assert "Rank 1 (stage 1) computes 1.33 times as long" in describe_mesh_steps(steps)
    assert "save up to 15 ms a step" in describe_mesh_steps(steps)


def test_steps_on_a_mesh_are_no_rounds_of_gradients() -> None:
    assert find_mesh_steps([]) is None
    with pytest.raises(ProfileError, match="reduced no gradients"):
        find_steps(recordings(2, 1))
