"""hvdkit compare on scripts with planted mistakes, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare_cases import record
from ranks import run_ranks

from hvdkit.tools.compare.records import RankRecord, read_records
from hvdkit.tools.compare.verdict import Verdict, judge

HERE = Path(__file__).parents[1] / "support"


def compare(folder: Path, script: str, *planted: str, options: tuple[str, ...] = ()) -> tuple[int, Any]:
    """Compare the script with these mistakes; returns the exit code and what --json says."""
    job = [] if options else [sys.executable, "-m", "hvdkit.launch", "-np", "2"]  # either form of a training
    command = [sys.executable, "-m", "hvdkit", "compare", "--json", *options, "--"]
    command += [*job, sys.executable, str(HERE / script), *planted]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    env.setdefault("KERAS_BACKEND", "torch")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def names(found: Any) -> list[str]:
    return [cause["name"] for cause in found["causes"]]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_right_script_is_the_same_training(tmp_path: Path) -> None:
    code, found = compare(tmp_path, "compare_script.py", options=("-np", "3", "--steps", "8"))
    assert (code, found["verdict"], names(found)) == (0, "equal", [])
    assert (found["ranks"], found["steps"]) == (3, 8)
    assert found["within"] < 1e-6
    assert list(tmp_path.iterdir()) == []


def run_case(folder: Path, framework: str, planted: tuple[str, ...]) -> Verdict:
    """What compare says of a training in ranks that are there already, without its command."""

    def run(name: str, count: int, others: str | None) -> list[RankRecord]:
        (folder / name).mkdir()
        backend = "torch" if framework == "keras" else ""
        run_ranks(count, record, framework, str(folder / name), planted, others, backend=backend)
        return read_records(folder / name)

    many, given = run("ranks", 2, None), str(folder / "ranks")
    return judge(many, run("one", 1, given)[0], lambda: run("again", 1, given)[0])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("planted", "causes"),
    [
        pytest.param("", None, marks=pytest.mark.slow),
        ("same-samples rate-scaled-twice left-out", None),
        ("rate-scaled-for-nothing batch-norm", None),
        ("no-broadcast", None),
        ("not-reduced", None),
        ("sum", None),
        ("unseeded", ["not-deterministic"]),
        ("noise", ["random-in-step"]),
    ],
)
def test_a_planted_mistake_is_named(tmp_path: Path, planted: str, causes: list[str] | None) -> None:
    verdict = run_case(tmp_path, "torch", tuple(planted.split()))
    assert verdict.equal == (planted == "")
    assert sorted(cause.name for cause in verdict.causes) == sorted(planted.split() if causes is None else causes)
    assert verdict.first is None or verdict.first.step == 0


@pytest.mark.ranks
def test_a_mistake_in_a_script_is_told_to_programs(tmp_path: Path) -> None:
    code, found = compare(tmp_path, "compare_script.py", "sum", "rate-scaled-twice")
    assert (code, found["verdict"], sorted(names(found))) == (1, "different", ["rate-scaled-twice", "sum"])
    assert (found["first"]["step"], found["first"]["what"]) == (0, "gradients")


@pytest.mark.slow
@pytest.mark.ranks
def test_keras_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    if importlib.util.find_spec("jax") is not None:  # of Keras's backends the fastest to import, five times here
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    code, found = compare(tmp_path, "compare_keras_script.py", options=("--steps", "3"))
    assert (code, found["verdict"], names(found)) == (0, "equal", [])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.keras("torch")
@pytest.mark.parametrize("planted", ["sum", "batch-norm"])
def test_a_mistake_in_keras_is_named(tmp_path: Path, planted: str) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    verdict = run_case(tmp_path, "keras", (planted,))
    assert [cause.name for cause in verdict.causes] == [planted]


@pytest.mark.ranks
def test_a_script_without_a_step_cannot_be_compared(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdkit", "compare", "--", sys.executable, "-c", "print('nothing')"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "without a recorded training step" in done.stderr and "nothing" in done.stderr
