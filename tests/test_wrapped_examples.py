"""The plain twins of the examples, which know nothing of hvdkit, on two ranks with `hvdrun --wrap`."""

from __future__ import annotations

from pathlib import Path

import pytest
from gallery import EXAMPLES, REACHED, check_reached, start

TWINS = sorted(path.name for path in (EXAMPLES / "plain").glob("*.py"))


@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(REACHED))
def test_a_plain_script_learns_what_its_twin_does(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, f"plain/{name}", ["-np", "2", "--wrap"])
    assert done.returncode == 0, done.stdout + done.stderr
    check_reached(name, done.stdout)
    assert "[1]" not in done.stdout, "only rank 0 prints"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in TWINS if name not in REACHED])
def test_a_plain_script_writes_one_checkpoint(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, f"plain/{name}", ["-np", "2", "--wrap"], ["--epochs", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy" in done.stdout
    assert "[1]" not in done.stdout, "only rank 0 prints"
    assert [path.stem for path in tmp_path.iterdir()] == ["digits"]


def test_every_example_has_a_plain_twin_unless_it_has_a_loop_of_tensorflow_or_shows_nothing_new_without_ranks() -> None:
    without = {"pytorch_elastic_digits.py", "pytorch_resumable_digits.py", "tensorflow2_digits.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} - set(TWINS) == without
