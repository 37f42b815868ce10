"""What --wrap decides, without ranks."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned_job import plan_job
from recorded_nodes import plant_node
from refused import refused

from hvdkit.gpu_vendors import list_gpus
from hvdkit.launch.cli.options import parse_arguments
from hvdkit_wrap.environment import plan_shown_gpu, plan_visible_gpu
from hvdkit_wrap.places import user_callsite
from hvdkit_wrap.randomness import read_states, seed_of, seed_per_rank, set_states
from hvdkit_wrap.report import Report
from hvdkit_wrap.row_sums import find_product
from hvdkit_wrap.shares import join_batches, joined_length, plan_share
from hvdkit_wrap.torch_losses import FIXED, MEAN, SUM, kinds_of, leaves_out


@given(st.integers(0, 50), st.integers(1, 7), st.none() | st.integers(1, 50))
def test_the_shares_of_a_batch_weigh_as_the_whole_batch(count: int, size: int, nominal: int | None) -> None:
    batch = [value * value for value in range(count)]
    shares = [plan_share(batch, rank=rank, size=size, nominal=nominal) for rank in range(size)]
    assert all(share.rows for share in shares) or not batch, "a mean over no rows is no number"
    if shares[0].split:
        assert [row for share in shares for row in share.rows] == batch
    if batch:
        means = [sum(share.rows) / len(share.rows) * share.mean_weight for share in shares]
        assert sum(means) / size == pytest.approx(sum(batch) / count)
        assert sum(sum(share.rows) * share.sum_weight for share in shares) / size == pytest.approx(sum(batch))


def test_a_small_last_batch_leaves_no_rank_with_a_single_row() -> None:
    assert not plan_share(range(3), rank=0, size=2, nominal=16).split
    assert plan_share(range(4), rank=0, size=2, nominal=16).split
    assert plan_share(range(2), rank=0, size=2, nominal=2).split, "a batch as large as the others is split"


@given(st.lists(st.lists(st.integers(), max_size=4), max_size=9), st.integers(1, 4))
def test_joined_batches_have_the_same_rows_in_the_same_order(batches: list[list[int]], count: int) -> None:
    joined = list(join_batches(batches, count))
    assert [row for batch in joined for row in batch] == [row for batch in batches for row in batch]
    assert len(joined) == joined_length(len(batches), count)


def test_the_reduction_of_a_loss_is_read_from_its_graph() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    output, labels = torch.randn(4, 3) @ weight, torch.tensor([0, 1, 2, 0])
    penalty = 0.1 * weight.pow(2).sum() + weight.norm()
    entropy = torch.nn.functional.cross_entropy
    by_kind = {
        MEAN: [
            entropy(output, labels),
            entropy(output, labels, label_smoothing=0.1),
            entropy(output, labels) / 3 + penalty,
            output.pow(2).mean() - 2 * output.abs().mean(),
            output.sum() / 4,
            torch.nn.functional.kl_div(output, output.detach(), reduction="batchmean"),
        ],
        SUM: [entropy(output, labels, reduction="sum"), output.pow(2).sum(), output.sum() / 8],
        "": [output.pow(2).mean().sqrt(), output.max(), output.mean() * output.sum()],
    }
    for kind, losses in by_kind.items():
        for loss in losses:
            assert kinds_of(loss, rows=4, whole=8) - {FIXED} == ({kind} if kind else set()), loss.grad_fn
    assert kinds_of(output.mean() + output.sum(), rows=4, whole=8) == {MEAN, SUM}
    assert kinds_of(output.sum() + penalty, rows=4, whole=8) == {SUM, FIXED}
    assert not leaves_out(entropy(output, labels) / 2)
    assert leaves_out(entropy(output, labels, ignore_index=1) / 2)
    assert leaves_out(entropy(output, labels, weight=torch.tensor([1.0, 2.0, 3.0])))
    gone = entropy(output, labels, weight=torch.tensor([1.0, 2.0, 3.0])) / 2
    gone.backward()
    assert kinds_of(gone, rows=4, whole=8) == {MEAN}
    assert not leaves_out(gone), "its graph is gone"


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("tot += loss.item() * len(x)", True),
        ("tot += x.size(0) * loss.item() / 60", True),
        ("value = loss.item()\n    n = x.shape[0]\n    tot += value * n", True),
        ("tot += (\n        loss.item()\n        * batch['x'].size(0))", True),
        ("tot += loss.item() * len(x)\n    seen += len(x)", False),
        ("tot += loss.item() * len(x)\n    seen += len(x)\n    print(tot / seen)", False),
        ("tot += loss.item() * len(x)\n    seen += len(x)\n    tot /= max(seen, 1)", False),
        ("tot += loss.item() * len(x)\n    seen += len(x)\n    print(tot / len(train), 6 / seen)", True),
        ("tot += loss.item() * len(x)\n    seen += len(x)\n    print(f'{tot / 60:.3f} {6 / seen}')", True),
        ("tot = tot + loss.item() * len(x)\n    seen += len(x)\n    tot /= 60", True),
        ("n = len(x)\n    tot += loss.item() * n\n    seen += n\n    print(tot / len(train))", True),
        ("loss.item()\n    if not loss:\n        tot += loss.item() * len(x)", False),
        ("tot += loss.item() * 20", False),
        ("tot += loss.item() * len(train)", False),
        ("tot += loss.item()", False),
        ("tot += loss.item() * count(x)", False),
    ],
)
def test_a_sum_of_losses_times_the_rows_of_a_rank_is_found(tmp_path: Path, loop: str, found: bool) -> None:
    """Ranks have 6 rows of a batch of 20; the second step knows all names."""
    lines: list[int] = []

    class Loss:
        def item(self) -> float:
            lines.append(find_product(sys._getframe(1), 6))
            return 1.0

    script = tmp_path / "train.py"
    script.write_text(f"seen = tot = 0\nfor step in range(2):\n    {loop}\n")
    x = torch.zeros(6, 2)
    names = {"loss": Loss(), "x": x, "batch": {"x": x}, "train": range(60), "count": len}
    exec(compile(script.read_text(), str(script), "exec"), names)
    assert bool(lines[-1]) == found and (not found or lines[-1] >= 3)


def test_each_rank_sees_the_gpu_that_is_its_own() -> None:
    assert plan_visible_gpu(None, 4, 1) == "1"
    assert plan_visible_gpu("GPU-a,GPU-b", 8, 3) == "GPU-b"
    for left_alone in [("2", 8, 1), ("", 8, 1), (None, 0, 1), (None, 1, 1), (None, 4, None)]:
        assert plan_visible_gpu(*left_alone) is None


@pytest.mark.parametrize(
    ("node", "environ", "local_rank", "expected"),
    [
        ("frontier", {}, 5, ("HIP_VISIBLE_DEVICES", "5")),
        ("frontier", {"ROCR_VISIBLE_DEVICES": "6,7"}, 3, ("HIP_VISIBLE_DEVICES", "1")),
        ("frontier", {"CUDA_VISIBLE_DEVICES": "4,2"}, 0, ("HIP_VISIBLE_DEVICES", "4")),
        ("frontier", {"ROCR_VISIBLE_DEVICES": "6,7,1", "HIP_VISIBLE_DEVICES": "2,0"}, 0, ("HIP_VISIBLE_DEVICES", "2")),
        ("aurora", {}, 7, ("ONEAPI_DEVICE_SELECTOR", "level_zero:7")),
        ("aurora", {"ZE_AFFINITY_MASK": "8,9,10"}, 1, ("ONEAPI_DEVICE_SELECTOR", "level_zero:1")),
        ("frontier", {"ROCR_VISIBLE_DEVICES": "6"}, 1, None),
        ("frontier", {"ROCR_VISIBLE_DEVICES": ""}, 1, None),
        ("aurora", {}, None, None),
    ],
)
def test_each_rank_sees_its_own_gpu_of_another_vendor(
    tmp_path: Path, node: str, environ: dict[str, str], local_rank: int | None, expected: tuple[str, str] | None
) -> None:
    vendor, gpus = list_gpus(plant_node(node, tmp_path), environ)
    assert plan_shown_gpu(vendor, gpus, environ, local_rank) == expected
    if expected and local_rank is not None:
        before = vendor.select(environ, gpus).gpus
        assert vendor.select({**environ, expected[0]: expected[1]}, gpus).gpus == (before[local_rank % len(before)],)


def test_a_ranks_own_random_numbers_follow_from_rank_zeros_and_can_be_left_again() -> None:
    before = read_states()
    assert seed_of(before, 1) != seed_of(before, 2)
    expected = (random.random(), torch.rand(1))
    set_states(before)
    seed_per_rank(seed_of(before, 1))
    assert (random.random(), torch.rand(1)) != expected
    set_states(before)
    assert (random.random(), torch.rand(1)) == expected


def test_the_table_is_shown_once_and_says_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.say("output", "quiet")
    report.say("ranks", "two")
    report.say("ranks", "two")
    assert report.ordered() == [("ranks", "two"), ("output", "quiet")]
    report.show(here=True)
    report.show(here=True)
    assert capsys.readouterr().err.count("two") == 1


def test_flags_of_wrap_go_with_it() -> None:
    environ = {"PATH": "/bin"}
    job = plan_job(parse_arguments(["-np", "2", "--wrap", "--wrap-batch", "multiply", "true"]), environ)
    assert job.variables["HVDKIT_WRAP"] == "1" and job.variables["HVDKIT_WRAP_BATCH"] == "multiply"
    assert int(job.variables["HVDKIT_WRAP_SEED"]) >= 0
    with refused("setting-needs-wrap", names=["--wrap-batch"]):
        plan_job(parse_arguments(["-np", "2", "--wrap-batch", "multiply", "true"]), environ)
    with refused("options-contradict", names=["--wrap", "--alias-horovod"]):
        plan_job(parse_arguments(["-np", "2", "--wrap", "--alias-horovod", "true"]), environ)


@pytest.mark.parametrize(
    "library", ["/opt/site/lib/python3/site-packages/torch/optim.py", "/usr/lib/dist-packages/x.py"]
)
def test_a_package_of_another_environment_is_not_taken_for_the_script(library: str) -> None:
    """As in a virtual environment that uses the packages of the system's Python."""
    inner: dict[str, object] = {"user_callsite": user_callsite}
    exec(compile("def call():\n    return user_callsite()", library, "exec"), inner)
    outer = {"call": inner["call"]}
    exec(compile("\n\nseen = call()", "train.py", "exec"), outer)
    assert outer["seen"] == "train.py:3"
