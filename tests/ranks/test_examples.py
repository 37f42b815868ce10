from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gallery import ENOUGH, EPOCHS, REACHED, check_reached, play
from ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PLAIN = sorted((ROOT / "examples" / "plain").glob("*.py"))
DIGITS = str(ROOT / "examples" / "pytorch_digits.py")
ALL_LEARNED = ("--min-accuracy", "0.97")  # after the 20 epochs that the script does by itself


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_marks_what_makes_it_distributed(example: Path) -> None:
    lines = example.read_text().splitlines()
    assert len(lines) < 100
    assert sum("# hvd" in line for line in lines) >= 5


@pytest.mark.parametrize("example", PLAIN, ids=lambda path: path.name)
def test_a_plain_script_is_short_and_knows_nothing_of_hvdkit(example: Path) -> None:
    assert example.with_name("..").resolve() / example.name in EXAMPLES
    assert len(example.read_text().splitlines()) < 100
    assert "hvd" not in example.read_text()


#: The quick tier has one example of PyTorch's averages.
QUICK = {"pytorch_regression.py"}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    marks = [] if name in QUICK else [pytest.mark.slow]
    return [*marks, pytest.mark.keras("torch")] if name.startswith("keras") else marks


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in sorted(REACHED)])
def test_an_example_learns_on_two_ranks(name: str) -> None:
    keras = name.startswith("keras")
    if keras and importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    first, second = run_ranks(2, play, name, backend="torch" if keras else "")
    check_reached(name, first)
    assert second == "" or name == "pytorch_two_models.py", "only rank 0 prints"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "last_epoch", "wished"),
    [
        (1, EPOCHS, ENOUGH),
        pytest.param(4, 20, ALL_LEARNED, marks=pytest.mark.slow),
    ],
    ids=["1", "4"],
)
def test_the_digits_are_learned_on_any_number_of_ranks(
    tmp_path: Path, ranks: int, last_epoch: int, wished: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "hvdkit.launch", "-np", str(ranks), sys.executable, DIGITS]
    command += ["--checkpoint", "digits.pt"]
    done = subprocess.run([*command, *wished], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    # One line an epoch, from rank 0 alone, and nothing that only a terminal understands.
    epochs = re.findall(r"^\[0\] epoch (\d+)  loss ", done.stdout, re.MULTILINE)
    assert epochs == [str(epoch) for epoch in range(1, last_epoch + 1)]
    assert "[1]" not in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"[0] {ranks} rank")
    assert list(tmp_path.iterdir()) == [tmp_path / "digits.pt"]
    assert set(torch.load(tmp_path / "digits.pt")) == {"model", "optimizer"}


def test_the_digits_are_learned_without_a_launcher(tmp_path: Path) -> None:
    command = [sys.executable, DIGITS, "--epochs", "1", "--min-accuracy", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, "one epoch does not get everything right"
    assert "test accuracy" in done.stdout
    assert list(tmp_path.iterdir()) == []
