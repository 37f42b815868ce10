"""hvdkit.parallel: trainings on meshes have the losses of one process, and what does not fit is an error before."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hvdrun_job import HVDRUN, environment
from parallel_model import PARTS, LanguageModel, make_model, train_alone
from parallel_saving import go_on
from parallel_training import REFUSED, SLOW_S, chain_of, measured, profiled, refusals, rows_of, train_all, v_shaped
from ranks import run_ranks
from torch import nn

from hvdkit.errors import ParallelError
from hvdkit.parallel.patterns import select
from hvdkit.parallel.placement import AXES, complete_mesh_sizes, describe_slow_tensor_parallelism, place
from hvdkit.parallel.saved_model import describe_difference
from hvdkit.parallel.stages import balance, plan_stages, stages_of_rank
from hvdkit.profiling.mesh_steps import describe_mesh_steps
from hvdkit.torch.parallel.chain import _check_chain, check_sharing, find_parts
from hvdkit.torch.parallel.modules import Stage, outline_of
from hvdkit.torch.parallel.pipeline import SCHEDULES

HERE = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "hint"),
    [
        (None, 3, 1, "Mesh(dp=4, tp=2, pp=1)"),
        (2, 2, 1, "Start the job with 4 ranks"),
        (None, 4, 4, "Mesh(dp=1, tp=4, pp=2)"),
        (None, 16, 1, "Mesh(dp=1, tp=8, pp=1)"),
    ],
)
def test_a_mesh_that_does_not_fit_the_world_is_told_one_that_does(dp: int | None, tp: int, pp: int, hint: str) -> None:
    with pytest.raises(ParallelError) as caught:
        complete_mesh_sizes(8, dp, tp, pp)
    assert hint in str(caught.value)
    assert "the world has 8" in str(caught.value)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ParallelError, match="tp=0"):
        complete_mesh_sizes(8, None, 0, 1)


def test_as_many_replicas_as_there_are_ranks_for() -> None:
    assert complete_mesh_sizes(8, None, 2, 2) == (2, 2, 2)


@pytest.mark.parametrize("slots", [(8, 8), (2, 2, 4, 8), (16,), (4, 3, 5, 4)])
def test_each_rank_has_one_place_and_tp_lies_inside_hosts(slots: tuple[int, ...]) -> None:
    hosts = [f"h{number}" for number, count in enumerate(slots) for _ in range(count)]
    hosts = [hosts[at] for at in np.random.default_rng(0).permutation(16)]  # ranks are not in the order of hosts
    placement = place(hosts, dp=4, tp=2, pp=2)
    assert sorted(placement.ranks.flat) == list(range(16))
    across = [ranks for ranks in placement.groups("tp") if len({hosts[rank] for rank in ranks}) > 1]
    odd = sum(count % 2 for count in slots)
    assert len(across) == odd // 2, "only ranks that are alone on their hosts"
    assert bool(across) == bool(describe_slow_tensor_parallelism(placement, hosts))
    for axis, rank in itertools.product(AXES, range(16)):
        ranks = placement.group(axis, rank)
        assert [placement.coordinates(each)[axis] for each in ranks] == list(range(placement.size(axis)))
        assert len({tuple(v for k, v in placement.coordinates(each).items() if k != axis) for each in ranks}) == 1


def test_stages_are_between_hosts_and_replicas_inside() -> None:
    placement = place(["a"] * 4 + ["b"] * 4, dp=2, tp=2, pp=2)
    assert placement.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placement.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert placement.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_tensor_parallelism_over_a_network_is_told_its_cost() -> None:
    hosts = ["a", "a", "b", "b"]
    warning = describe_slow_tensor_parallelism(place(hosts, 1, 4, 1), hosts)
    # 4 allreduces a layer of 4096 * 4096 * 2 bytes, a ring sends 2 * 3 / 4 of them: 6 * 32 MiB, over 12.5 GB/s 16 ms.
    assert "192 MiB, 16 ms a layer at 100 Gbit/s" in warning
    assert "use tp=2" in warning


def test_patterns_match_between_dots() -> None:
    names = ["layers", "layers.0", "layers.0.up", "layers.1.up", "layers.1.up.x"]
    assert select("call()", ["layers.*.up"], names) == ["layers.0.up", "layers.1.up"]
    with pytest.raises(ParallelError, match=r"'layers\.\*\.op' names no module.*\n?.*Similar names: .*layers\.0\.up"):
        select("call()", ["layers.*.op"], names)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_are_balanced_as_well_as_they_can_be(stages: int) -> None:
    for seed in range(5):
        costs = np.random.default_rng(seed).random(7).tolist()
        ranges = balance(costs, stages)
        assert [at for each in ranges for at in each] == list(range(7))
        assert all(ranges)
        cuts = ([0, *inner, 7] for inner in itertools.combinations(range(1, 7), stages - 1))
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
        assert max(sum(costs[at] for at in each) for each in ranges) == pytest.approx(best)


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    assert [stages_of_rank(rank, 2, 4, v_shaped=False) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [stages_of_rank(rank, 2, 4, v_shaped=True) for rank in range(2)] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"stages": 3}, "stages=2"),
        ({"stages": 4}, "stages=2"),
        ({"parts": 1}, "parts="),
        ({"microbatches": 1}, "microbatches=2"),
        ({"several": True, "stages": 2}, "stages=4"),
        ({"several": True, "v_shaped": True, "stages": 6}, "stages=4"),
    ],
)
def test_stages_that_do_not_fit_are_refused(given: dict[str, Any], cure: str) -> None:
    fits: dict[str, Any] = {"parts": 8, "stages": 2, "microbatches": 4, "several": False, "v_shaped": False}
    assert plan_stages("x", 2, **fits) == 2
    with pytest.raises(ParallelError) as caught:
        plan_stages("x", 2, **{**fits, **given})
    assert cure in str(caught.value)


def test_a_checkpoint_of_another_model_is_described() -> None:
    text = describe_difference({"a": (2, 3), "b": (4,)}, {"a": (3, 2), "c": (1,)})
    assert text == "it lacks b; it has c besides; it has a with shape [3, 2], here [2, 3]"
    assert describe_difference({"a": (2,)}, {"a": (2,)}) == ""


def test_blocks_are_the_modules_that_repeat() -> None:
    assert outline_of(make_model(layers=3)).blocks == ("layers.0", "layers.1", "layers.2")


def test_a_stage_keeps_names_and_does_what_its_parts_do() -> None:
    model, codes = make_model(), torch.zeros(2, 16, dtype=torch.long)
    names = find_parts(model, PARTS)
    assert names == ["embedding", "layers.0", "layers.1", "head"]
    stage = Stage({name: model.get_submodule(name) for name in names}, outline_of(model))
    assert {*stage.state_dict()} == {*model.state_dict()}
    assert torch.equal(stage(codes), model(codes))
    assert _check_chain(model, [model.get_submodule(name) for name in names], names, codes) == ""


def test_a_model_that_is_no_chain_of_its_parts_is_refused() -> None:
    class Twice(LanguageModel):
        def forward(self, codes: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = super().forward(codes) * 2
            return scores

    model, codes = Twice(), torch.zeros(2, 16, dtype=torch.long)
    parts = [model.get_submodule(name) for name in find_parts(model, PARTS)]
    assert "differ by up to" in _check_chain(model, parts, find_parts(model, PARTS), codes)
    order = ["head", "embedding"]
    assert "head does not take" in _check_chain(model, [model.head, model.embedding], order, codes)


def test_parameters_outside_of_the_parts_are_refused() -> None:
    with pytest.raises(ParallelError, match=r"head\.norm\.weight is in none"):
        find_parts(make_model(), PARTS[:-1])


def test_a_parameter_that_two_stages_share_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    check_sharing(model, [["0", "1"]])
    with pytest.raises(ParallelError, match=r"0\.weight of stage 0 and 1\.weight of stage 1"):
        check_sharing(model, [["0"], ["1"]])


def _train_as_one_process(steps: int, trainings: list[dict[str, Any]], losses: list[list[float]]) -> None:
    """The losses are those of one process with the whole batch."""
    torch.set_num_threads(1)
    expected = {clip: train_alone(steps, 16, clip) for clip in {each.get("clip", 0.0) for each in trainings}}
    assert len(losses) == len(trainings)
    for training, found in zip(trainings, losses, strict=True):
        np.testing.assert_allclose(found, expected[training.get("clip", 0.0)], atol=1e-4, err_msg=str(training))


def _on_ranks(ranks: int, steps: int, trainings: list[dict[str, Any]]) -> None:
    """The trainings, one after the other on the same ranks, are those of one process."""
    arguments = [{"steps": steps, "batch": 16, **each} for each in trainings]
    found = run_ranks(ranks, train_all, arguments, timeout=100)
    _train_as_one_process(steps, trainings, found[0])


def _under_hvdrun(ranks: int, script: str, *arguments: str) -> str:
    command = [*HVDRUN, "-np", str(ranks), sys.executable, script, *arguments]
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, cwd=HERE, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tensor_parallel_training_has_the_losses_of_one_process() -> None:
    _on_ranks(2, 3, [{"sizes": {"tp": 2}, "clip": 0.5}])


def test_a_profile_shows_stages_and_the_bubble() -> None:
    steps, other = run_ranks(2, profiled)
    assert steps is not None and other is None
    assert sum(steps.parts.values()) == pytest.approx(steps.step_s)
    first, last = steps.stages
    assert last.forward_s > 2 * SLOW_S > first.forward_s, "two micro-batches"
    assert steps.ranks[0]["pp"] > SLOW_S and steps.ranks[0]["pp"] > steps.ranks[1]["pp"]
    assert "Rank 1 (stage 1) computes" in describe_mesh_steps(steps)


#: Steps on meshes; other ways to train on them need fewer, as a wrong gradient shows in the third loss.
STEPS, FEWER = 20, 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (2, [{"dp": 2}, {"tp": 2}, {"pp": 2}]),
        (4, [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}]),
    ],
)
def test_a_training_on_a_mesh_has_the_losses_of_one_process(ranks: int, meshes: list[dict[str, int]]) -> None:
    _on_ranks(ranks, STEPS, [{"sizes": sizes, "clip": 0.5} for sizes in meshes])


@pytest.mark.slow
def test_three_axes_under_hvdrun_have_the_losses_of_one_process() -> None:
    training = {"sizes": {"dp": 2, "tp": 2, "pp": 2}, "clip": 0.5}
    arguments = [{"steps": STEPS, "batch": 16, **training}]
    lines = _under_hvdrun(8, "parallel_training.py", json.dumps(arguments)).splitlines()
    (line,) = [line for line in lines if line.startswith("[0] losses ")]
    _train_as_one_process(STEPS, [training], json.loads(line.removeprefix("[0] losses ")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "trainings"),
    [
        pytest.param(
            2,
            [
                {"sizes": {"dp": 2}, "recompute": True, "clip": 0.5},
                {"sizes": {"dp": 2}, "sharded": False},
                {"sizes": {"tp": 2}, "sequence": True, "recompute": True, "clip": 0.5},
                {"sizes": {"pp": 2}, "recompute": True, "clip": 0.5},
                *(
                    {"sizes": {"pp": 2}, "schedule": schedule, "microbatches": 4}
                    for schedule in SCHEDULES
                    if schedule != "1F1B"
                ),
            ],
            id="one axis",
        ),
        pytest.param(
            4,
            [
                {"sizes": {"dp": 2, "tp": 2}, "clip": 0.5, "sharded": False},
                {"sizes": {"dp": 2, "pp": 2}, "clip": 0.5, "sharded": False},
                {"sizes": {"dp": 2, "pp": 2}, "schedule": "DualPipeV", "microbatches": 4},
                {"sizes": {"tp": 2, "pp": 2}, "schedule": "ZBVZeroBubble", "microbatches": 4, "sequence": True},
            ],
            id="two axes",
        ),
    ],
)
def test_other_ways_on_a_mesh_have_the_losses_of_one_process(ranks: int, trainings: list[dict[str, Any]]) -> None:
    _on_ranks(ranks, FEWER, trainings)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_all_stages_get_the_loss_of_the_last(schedule: str, dtype: torch.dtype) -> None:
    model = chain_of(6, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted = []
    for seed in range(3):
        inputs, targets = rows_of(seed, dtype)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    found = run_ranks(3, v_shaped, schedule, dtype)
    assert found == [(found[0][0], str(dtype))] * 3
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 0.05)
    assert found[0][0] == pytest.approx(wanted, rel=tolerance)


MODELS = {
    "tuple": "the model returns a tuple, not a tensor",
    "dtype": "torch.float32, the model's of torch.float64",
    "shape": r"the shape (2, 4), the model's has (1, 2, 4)",
    "model": "the model does not take the example, whose shape is (2, 4) (RuntimeError: no good)",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_all_ranks_are_told_why_a_model_is_no_chain(case: str) -> None:
    told = run_ranks(3, measured, case)
    assert told == [told[0]] * 3 and MODELS[case] in told[0]


@pytest.mark.slow
def test_what_would_train_wrongly_is_refused_before_it_trains() -> None:
    assert run_ranks(4, refusals) == [REFUSED] * 4


@pytest.mark.slow
def test_a_checkpoint_is_continued_on_other_meshes(tmp_path: Path) -> None:
    """Losses of three jobs on different meshes are those of one process; a checkpoint of another model is refused."""
    losses: list[float] = []
    meshes = [(4, {"dp": 2, "tp": 2}, True), (2, {"pp": 2}, True), (2, {"dp": 2}, False)]
    for number, (ranks, sizes, sharded) in enumerate(meshes):
        first, last = 2 * number, 2 * number + 2
        losses += run_ranks(ranks, go_on, sizes, str(tmp_path / "saved"), first, last, sharded)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    np.testing.assert_allclose(losses, train_alone(6, 16), atol=1e-4)


@pytest.mark.slow
def test_the_example_has_the_same_losses_on_each_mesh() -> None:
    """Layers cut over ranks and stages are ways to compute the same."""
    example = str(HERE.parents[1] / "examples/pytorch_parallel.py")
    losses = [
        [
            float(line.split()[-1])
            for line in _under_hvdrun(2, example, axis, "2", "--steps", "10", "--batch-size", "8").splitlines()
            if " loss " in line
        ]
        for axis in ("--tp", "--pp")
    ]
    assert len(losses[0]) == 1
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-3)
