"""hvdrun --wrap with real scripts: what N ranks end with is what one process ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.group("jobs")]

HERE = Path(__file__).parent
Weights = dict[str, dict[str, torch.Tensor]]


def run(name: str, *arguments: object, ranks: int = 0, options: tuple[str, ...] = ("--wrap",)) -> tuple[str, str]:
    """What a script prints, and what it says on stderr. ranks: 0 for a process that is started without hvdrun."""
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    if ranks:
        command = [sys.executable, "-m", "hvdkit.launch", "-np", str(ranks), *options, *command]
    path = os.pathsep.join(filter(None, [str(HERE.parents[2]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def assert_same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for case, state in one.items():
        for name, tensor in state.items():
            torch.testing.assert_close(other[case][name], tensor, rtol=0, atol=1e-5, msg=lambda m: f"{case}: {m}")  # noqa: B023


@pytest.mark.parametrize(("ranks", "batch"), [(2, 33), pytest.param(3, 16, marks=pytest.mark.slow)])
def test_a_script_for_one_process_ends_on_many_ranks_as_in_one_process(tmp_path: Path, ranks: int, batch: int) -> None:
    for name in ("alone", "wrapped"):
        (tmp_path / name).mkdir()
    alone, _ = run("wrap_script.py", tmp_path / "alone" / "end.pt", batch)
    wrapped, said = run("wrap_script.py", tmp_path / "wrapped" / "end.pt", batch, ranks=ranks)
    assert_same(torch.load(tmp_path / "alone" / "end.pt"), torch.load(tmp_path / "wrapped" / "end.pt"))
    assert wrapped == "".join(f"[0] {line}\n" for line in alone.splitlines()), "rank 0 alone prints, and the same"
    assert said.count("hvdrun --wrap") == said.count("experimental: --wrap") == 1 and "wrap_script.py:" in said, said


@pytest.mark.slow
def test_a_multiplied_batch_is_a_large_one_with_a_scaled_learning_rate(tmp_path: Path) -> None:
    for name in ("alone", "wrapped"):
        (tmp_path / name).mkdir()
    run("wrap_script.py", tmp_path / "alone" / "end.pt", 22, 2)
    options = ("--wrap", "--wrap-batch", "multiply", "--wrap-warmup", "0")
    run("wrap_script.py", tmp_path / "wrapped" / "end.pt", 11, 1, ranks=2, options=options)
    ends: list[Weights] = [torch.load(tmp_path / name / "end.pt") for name in ("alone", "wrapped")]
    assert_same(ends[0], {name: ends[1][name] for name in ends[0]})


@pytest.mark.slow
def test_a_wrapped_script_does_what_its_twin_written_by_hand_does(tmp_path: Path) -> None:
    run("wrap_plain_twin.py", tmp_path / "wrapped.pt", ranks=2)
    run("wrap_twin.py", tmp_path / "by_hand.pt", ranks=2, options=())
    assert_same({"": torch.load(tmp_path / "by_hand.pt")}, {"": torch.load(tmp_path / "wrapped.pt")})


def test_what_cannot_be_made_right_is_refused_with_its_line() -> None:
    told, _ = run("wrap_refused.py", ranks=2)
    lines = told.splitlines()
    words = [
        "is an IterableDataset",
        "batch_size=None",
        "DistributedDataParallel",
        "torch.distributed",
        "hvd.init()",
        "imports Horovod",
        "adds a sum over the rows of a batch",
        "adds a sum over the rows of a batch",
        "gradients that backward() did not compute",
        "to its end without backward()",
    ]
    for line, word in zip(lines, words, strict=False):
        assert word in line and "wrap_refused.py:" in line, told
    assert lines[len(words) :] == ["[0] child False", "[0] environment 0"], told


@pytest.mark.slow
def test_a_multiplied_batch_is_warmed_up_and_the_script_sees_its_own_rate() -> None:
    options = ("--wrap", "--wrap-batch", "multiply", "--wrap-warmup", "2")
    said, _ = run("wrap_rates_script.py", ranks=2, options=options)
    steps, rate = said.replace("[0] ", "").splitlines()
    expected = [0.1 * min(1 + step / 16, 2) for step in range(24)]  # 8 steps an epoch, from 0.1 to 0.2 in two of them
    assert [float(step) for step in steps.split()] == pytest.approx(expected, abs=2e-5)
    assert rate == "0.1"


ROWS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model, total, means = torch.nn.Linear(4, 1), 0.0, 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(60, 4)), batch_size=20)
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    total += loss.item() * x.size(0)
    optimizer.step()
    means += loss.item()
print(total / 60 / (means / len(loader)))
"""


@pytest.mark.slow
def test_a_sum_over_rows_of_one_rank_is_warned_of_and_quiet_hides_the_table(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ROWS)
    options = ("--wrap", "-q")
    printed, said = run(str(script), ranks=3, options=options)
    assert float(printed.split()[-1]) == pytest.approx(1 / 3, abs=0.1)
    assert said.count("multiplies loss.item()") == 1 and "train.py:11 multiplies" in said and "by 6, the rows" in said
    assert "experimental: --wrap" not in said, "the table"
