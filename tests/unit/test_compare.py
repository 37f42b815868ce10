"""What hvdkit compare makes of records: pure functions, no training."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hvdkit.cli import build_parser, main
from hvdkit.errors import CompareError
from hvdkit.tools.compare.recorder.session import copy, count_rows, hash_rows, join
from hvdkit.tools.compare.records import KEPT, Loader, RankRecord, Step, ratio, read_records, thin, write_record
from hvdkit.tools.compare.runs import plan_runs
from hvdkit.tools.compare.verdict import Verdict, judge, print_verdict, show_json

RATE, STEPS, ROWS = 0.1, 3, 4
Change = Callable[[list[RankRecord], RankRecord], None]


def make_records(ranks: int = 2) -> tuple[list[RankRecord], RankRecord]:
    """SGD on made-up gradients: each rank's own, averaged, and on one rank the same averages."""
    numbers = np.random.RandomState(0)
    start = {"weight": numbers.rand(6), "bias": numbers.rand(20)}
    gradients = [{name: numbers.rand(value.size) - 0.5 for name, value in start.items()} for _ in range(STEPS)]
    many = [RankRecord(rank, ranks, "torch") for rank in range(ranks)]
    one = RankRecord(0, 1, "torch")
    for record in (*many, one):
        samples = -(-40 // record.size)
        record.loaders.append(Loader(0, samples, ROWS, drop_last=False))
        record.initial = dict(start)
        parameters = start
        for number, gradient in enumerate(gradients):
            parameters = {name: value - RATE * gradient[name] for name, value in parameters.items()}
            rows = [f"{number}-{row}-{rank}" for row in range(ROWS) for rank in range(ranks)]
            mine = rows if record is one else rows[record.rank :: ranks]
            scale = RATE if record is one else RATE * ranks
            step = Step(0, 1.0 - 0.1 * number, [RATE * ranks], [scale], len(mine), mine)
            step.gradients, step.parameters = gradient, parameters
            record.steps.append(step)
    return many, one


def conclude(change: Change | None = None, *, repeats: bool = True, ranks: int = 2, wrapped: bool = False) -> Verdict:
    many, one = make_records(ranks)
    if change is not None:
        change(many, one)
    again = deepcopy(one)
    if not repeats:
        again.steps[0].loss = 7.0
    return judge(many, one, lambda: again, wrapped=wrapped)


@pytest.mark.parametrize("ranks", [2, 3])
def test_runs_that_do_the_same_are_equal(ranks: int) -> None:
    verdict = conclude(ranks=ranks)
    assert verdict.equal and not verdict.causes and verdict.first is None
    assert verdict.within == 0 and verdict.steps == STEPS


def test_rounding_is_no_difference() -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        for step in one.steps:
            step.loss = (step.loss or 0.0) * (1 + 1e-6)
            step.gradients = {name: value * (1 + 1e-6) for name, value in step.gradients.items()}
            step.parameters = {name: value * (1 - 1e-7) for name, value in step.parameters.items()}

    verdict = conclude(change)
    assert verdict.equal
    assert 0 < verdict.within < 1e-6


def flip_in(*steps: int, by: float = 0.03) -> Change:
    """The bias has another gradient in these steps, and the parameters what it makes of them."""

    def change(many: list[RankRecord], one: RankRecord) -> None:
        for at in steps:
            off = by * np.linalg.norm(one.steps[at].gradients["bias"]) * np.eye(20)[3]
            for record in many:
                record.steps[at].gradients = record.steps[at].gradients | {
                    "bias": one.steps[at].gradients["bias"] + off
                }
                for step in record.steps[at:]:
                    step.parameters = step.parameters | {"bias": step.parameters["bias"] - 0.1 * RATE * off}

    return change


def test_a_sign_that_rounding_flips_in_one_step_is_no_difference() -> None:
    verdict = conclude(flip_in(1))
    assert verdict.equal and verdict.first is not None and verdict.first.tensor == "bias"
    assert "Gradients differ in step 2 only, most of all those of bias" in verdict.notes[-1]
    for change in (flip_in(0, 1), flip_in(STEPS - 1), flip_in(1, by=0.2)):  # again, to the end, or by much
        assert not conclude(change).equal


@pytest.mark.parametrize("names", [("bias", "weight"), ("bias",), ("weight",)])
def test_gradients_of_a_wrong_scale_in_one_step_are_a_difference_also_where_the_optimizer_does_not_feel_it(
    names: tuple[str, ...],
) -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        for record in many:
            step = record.steps[1]
            step.gradients = step.gradients | {name: 1.03 * step.gradients[name] for name in names}

    assert not conclude(change).equal


def start_elsewhere(many: list[RankRecord], one: RankRecord) -> None:
    many[1].initial = {name: value + 1 for name, value in many[1].initial.items()}
    for step in many[1].steps:
        step.parameters = {name: value + 1 for name, value in step.parameters.items()}


def step_alone(many: list[RankRecord], one: RankRecord) -> None:
    for step in many[1].steps:
        step.gradients = {name: 2 * value for name, value in step.gradients.items()}
        step.parameters = {name: value + 0.01 for name, value in step.parameters.items()}


def step_by_other_rates(many: list[RankRecord], one: RankRecord) -> None:
    step_alone(many, one)
    for step in many[1].steps:
        step.rates = [0.5]


def keep_other_momentum(many: list[RankRecord], one: RankRecord) -> None:
    many[1].steps[1].parameters = {name: value + 0.01 for name, value in many[1].steps[1].parameters.items()}


def read_the_same(many: list[RankRecord], one: RankRecord) -> None:
    for step, first in zip(many[1].steps, many[0].steps, strict=True):
        step.hashes = first.hashes


def read_everything(many: list[RankRecord], one: RankRecord) -> None:
    for record in many:
        record.loaders[0].samples = one.loaders[0].samples


def drop_the_last(many: list[RankRecord], one: RankRecord) -> None:
    for record in many:
        record.loaders[0] = Loader(0, 19, ROWS, drop_last=True)


def scale_twice(many: list[RankRecord], one: RankRecord) -> None:
    for record in many:
        for step in record.steps:
            step.first_rates = [RATE * len(many) ** 2]


def scale_for_nothing(many: list[RankRecord], one: RankRecord) -> None:
    for record in many:
        record.loaders[0].batch = ROWS // len(many)


def scale_gradients(factor: float) -> Change:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        for record in many:
            for step in record.steps:
                step.gradients = {name: value * factor for name, value in step.gradients.items()}
                step.parameters = {name: value + 1.0 for name, value in step.parameters.items()}

    return change


def add_up_losses(many: list[RankRecord], one: RankRecord) -> None:
    scale_gradients(0.5)(many, one)
    for step in one.steps:
        step.loss = 2 * (step.loss or 0.0)


def step_too_far_in_keras(many: list[RankRecord], one: RankRecord) -> None:
    for record in (*many, one):
        for step in record.steps:
            step.gradients = {}
    for record in many:
        step = record.steps[0]
        step.parameters = {name: 2 * value - one.initial[name] for name, value in step.parameters.items()}


def normalise(many: list[RankRecord], one: RankRecord) -> None:
    one.steps[0].loss = 1.01
    many[0].batch_norm = ["BatchNorm1d bn"]


def draw_noise(many: list[RankRecord], one: RankRecord) -> None:
    one.steps[0].loss = 1.01
    many[1].steps[0].random = True


def give_unequal_batches(many: list[RankRecord], one: RankRecord) -> None:
    many[1].steps[0].rows = ROWS - 1
    turned = many[0].steps[0].gradients["weight"][::-1]
    for record in many:
        record.steps[0].gradients = {**record.steps[0].gradients, "weight": turned}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no-broadcast", start_elsewhere),
        ("not-reduced", step_alone),
        ("rates-differ", step_by_other_rates),
        ("optimizer-state", keep_other_momentum),
        ("same-samples", read_the_same),
        ("whole-epoch", read_everything),
        ("left-out", drop_the_last),
        ("rate-scaled-twice", scale_twice),
        ("rate-scaled-for-nothing", scale_for_nothing),
        ("sum", scale_gradients(2.0)),
        ("sum", step_too_far_in_keras),
        ("loss-is-a-sum", scale_gradients(0.5)),
        ("loss-is-a-sum", add_up_losses),
        ("scaled-gradients", scale_gradients(0.1)),
        ("batch-norm", normalise),
        ("random-in-step", draw_noise),
        ("unequal-batches", give_unequal_batches),
    ],
)
def test_one_mistake_has_one_cause(name: str, change: Change) -> None:
    verdict = conclude(change)
    assert not verdict.equal
    assert [cause.name for cause in verdict.causes] == [name]


def test_a_script_that_does_not_repeat_itself_is_told_from_one_that_draws_on_each_rank() -> None:
    assert [cause.name for cause in conclude(draw_noise, repeats=False).causes] == ["not-deterministic"]


def test_an_unknown_difference_is_told_as_one() -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        one.steps[1].loss = 5.0

    verdict = conclude(change)
    assert not verdict.equal and not verdict.causes
    assert verdict.first is not None and (verdict.first.step, verdict.first.what) == (1, "loss")


def test_the_first_difference_names_step_and_tensor() -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        for step in one.steps[1:]:
            step.gradients = {**step.gradients, "bias": -step.gradients["bias"]}

    first = conclude(change).first
    assert first is not None
    assert (first.step, first.what, first.tensor) == (1, "gradients", "bias")


def test_with_wrap_data_and_rates_are_hvdkits_own() -> None:
    assert conclude(scale_twice, wrapped=True).equal


def test_sixteen_bits_get_wider_limits() -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        one.half = True
        one.steps[0].loss = 1.01

    verdict = conclude(change)
    assert verdict.equal
    assert any("float16" in note for note in verdict.notes)


def test_ranks_with_models_of_their_own_cannot_be_compared() -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        many[1].steps[0].parameters = {"other": np.zeros(1)}

    with pytest.raises(CompareError, match="process sets"):
        conclude(change)


def test_batches_that_were_not_seen_cannot_be_compared() -> None:
    def change(many: list[RankRecord], one: RankRecord) -> None:
        for record in many:
            for step in record.steps:
                step.rows = 0

    with pytest.raises(CompareError, match="DataLoader"):
        conclude(change)


@pytest.mark.parametrize("change", [None, step_alone])
def test_a_verdict_is_shown_to_people_and_programs(change: Change | None) -> None:
    verdict = conclude(change)
    console = Console(width=100, record=True, file=io.StringIO())
    print_verdict(verdict, console)
    text, found = console.export_text(), json.loads(show_json(verdict))
    assert found["verdict"] == ("equal" if change is None else "different")
    assert ("The same training" in text) == (change is None)
    assert ("not-reduced" in text) == (change is not None)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    many, _ = make_records()
    for record in many:
        write_record(record, tmp_path)
    read = read_records(tmp_path)
    assert [record.rank for record in read] == [0, 1]
    for before, after in zip(many, read, strict=True):
        assert after.loaders == before.loaders
        for one, other in zip(before.steps, after.steps, strict=True):
            assert (one.hashes, one.loss, one.rates) == (other.hashes, other.loss, other.rates)
            for name, value in one.parameters.items():
                np.testing.assert_array_equal(value, other.parameters[name])


def test_a_large_tensor_is_thinned() -> None:
    assert thin(np.zeros((300, 1000), np.float32)).size <= KEPT
    assert thin(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert thin(np.array(2.0)).tolist() == [2.0]


def test_gradients_are_told_as_multiples() -> None:
    one = {"a": np.array([1.0, 2.0]), "b": np.array([3.0])}
    factor, cosine = ratio({name: 2 * value for name, value in one.items()}, one)
    assert (factor, cosine) == pytest.approx((2.0, 1.0))


def test_batches_are_joined_row_by_row_whatever_holds_them() -> None:
    one = {"x": np.ones((2, 3)), "y": [np.zeros(2), ("a", "b")], "names": ["p", "q"]}
    other = {"x": np.zeros((1, 3)), "y": [np.ones(1), ("c",)], "names": ["r"]}
    joined = join([one, other])
    assert joined["x"].shape == (3, 3)
    assert joined["y"][0].tolist() == [0, 0, 1]
    assert joined["names"] == ["p", "q", "r"]
    assert count_rows(joined) == 3
    assert hash_rows({"x": one["x"]}) + hash_rows({"x": other["x"]}) == hash_rows({"x": joined["x"]})


def test_a_batch_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        copy([object()])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compare"], "hvdkit compare -np 2 -- python train.py"),
        (["compare", "-np", "1", "--", "python", "x.py"], "-np is 1"),
        (["compare", "--", "hvdrun", "-np", "1", "python", "x.py"], "-np is 1"),
        (["compare", "-np", "3", "--", "hvdrun", "-np", "2", "python", "x.py"], "both start ranks"),
    ],
)
def test_what_cannot_be_run_is_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "-1"], ["--timeout", "nan"], ["-np", "-2"]])
def test_numbers_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", *words, "--", "python", "x.py"])


@pytest.mark.parametrize(
    ("words", "many", "alone", "shared"),
    [
        (["--", "a.py"], "-np 2 -H localhost:2", "-np 1 -H localhost:1", False),
        (["--wrap", "-np", "3", "a.py"], "-np 3 -H localhost:3 --wrap", "-np 1 -H localhost:1 --wrap", False),
        (["-np", "auto", "a.py"], "-np auto", "-np 1 -H localhost:1", True),
        (["hvdrun", "-H", "n1:2,n2:2", "--tcp", "a.py"], "-H n1:2,n2:2 --tcp", "-np 1 -H localhost:1 --tcp", True),
        (["torchrun", "--nproc-per-node=4", "a.py"], "-np 4 -H localhost:4", "-np 1 -H localhost:1", False),
    ],
)
def test_both_runs_have_the_options_and_only_one_the_hosts(
    words: list[str], many: str, alone: str, shared: bool
) -> None:
    plan = plan_runs(build_parser().parse_args(["compare", *words]))
    assert [word for option in plan.hvdrun for word in option.words] == many.split()
    assert [word for option in plan.alone for word in option.words] == alone.split()
    assert plan.shared == shared and plan.script[-1] == "a.py"
