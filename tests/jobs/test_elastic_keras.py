"""Ranks that train with Keras die, and the others go on: on each backend, under hvdrun and its fault tolerance."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_job import started, train_and_kill
from hvdrun_job import ROOT, environment
from keras_ranks import PACKAGES

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400), pytest.mark.group("elastic jobs")]

SCRIPT = str(Path(__file__).parents[1] / "support" / "keras_elastic_script.py")
TORCH_LOOP = (
    str(Path(__file__).parents[1] / "support" / "without_tensorflow.py"),
    str(Path(__file__).parents[1] / "support" / "keras_torch_loop_script.py"),
)
LOOP = str(Path(__file__).parents[1] / "support" / "tensorflow_elastic_script.py")
DIGITS = (
    str(Path(__file__).parents[1] / "support" / "without_tensorflow.py"),
    str(ROOT / "examples" / "keras_elastic_digits.py"),
)
KILLED_AT = 30
#: On PyTorch Keras divides a loss by the number of samples in float32, whatever the dtype of all else.
CLOSE = {"torch": 1e-4, "tensorflow": 1e-10}


@pytest.fixture(params=["torch", "tensorflow"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    for package in ("keras", PACKAGES[name]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", name)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    return name


def alone(*arguments: str, script: str = SCRIPT) -> Any:
    """What one process comes to."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])["summary"]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "victim"), [("torch", 0)], indirect=["backend"])
def test_the_others_go_on_and_one_comes_in_its_place(victim: int, backend: str) -> None:
    command = (SCRIPT, "60", "0.03", "3")
    job = train_and_kill(3, [victim], "--min-np", "2", command=command, committed=KILLED_AT)
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(alone("60", "0", "3"), abs=CLOSE[backend])


@pytest.mark.slow
@pytest.mark.native("Horovod's core has no all-gather of buckets")
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_no_part_of_an_optimizer_is_lost_with_a_rank(backend: str) -> None:
    command = (SCRIPT, "60", "0.03", "3", "optimizer")
    job = train_and_kill(3, [0], "--min-np", "2", command=command, committed=KILLED_AT)
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(alone("60", "0", "3"), abs=CLOSE[backend])


@pytest.mark.slow
@pytest.mark.native("Horovod's core has no all-gather of buckets")
@pytest.mark.parametrize("backend", ["tensorflow"], indirect=True)
def test_divided_state_of_the_last_rank_is_saved_and_goes_on_with_two(tmp_path: Path, backend: str) -> None:
    options = ("--min-np", "2", "--elastic-checkpoints", str(tmp_path))
    command = (SCRIPT, "12", "0.03", "3", "optimizer")
    job = train_and_kill(3, [0, 1], *options, command=command, committed=KILLED_AT)
    assert job.process.returncode == 75, job.output
    with started("-np", "2", *options, command=command) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert "committed 1\n" not in output, "it has begun anew"
    assert job.result()["summary"] == pytest.approx(alone("12", "0", "3"), abs=CLOSE[backend])


#: On TensorFlow the test below does it.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_too_few_are_left_and_the_same_command_goes_on_from_the_last_commit(tmp_path: Path, backend: str) -> None:
    options, command = ("--min-np", "2", "--elastic-checkpoints", str(tmp_path)), (SCRIPT, "12", "0.03", "3")
    job = train_and_kill(2, [1], *options, command=command, committed=KILLED_AT)
    assert job.process.returncode == 75, job.output
    assert "1 rank left, and --min-np is 2" in job.output and "Run the same command again" in job.output
    with started("-np", "2", *options, command=command) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert "committed 1\n" not in output, "it has begun anew"
    assert job.result()["summary"] == pytest.approx(alone("12", "0", "3"), abs=CLOSE[backend])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow"], indirect=True)
def test_a_tf_function_goes_on_that_was_traced_before(tmp_path: Path, backend: str) -> None:
    job = train_and_kill(3, [0], "--min-np", "2", command=(LOOP, "100", "0.03", "3"), committed=KILLED_AT)
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(alone("100", "0", "3", script=LOOP), abs=1e-10)
    options = ("--min-np", "2", "--elastic-checkpoints", str(tmp_path))
    job = train_and_kill(3, [1, 2], *options, command=(LOOP, "2000", "0.03", "3"), committed=KILLED_AT)
    assert job.process.returncode == 75, job.output
    # On a busy machine more steps are done before the ranks are killed.
    steps = str(job.last_committed + 60)
    with started("-np", "3", *options, command=(LOOP, steps, "0", "3")) as job:
        output = job.end()
    assert job.process.returncode == 0 and "committed 3\n" not in output, output
    assert job.result()["summary"] == pytest.approx(alone(steps, "0", "3", script=LOOP), abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_one_comes_whose_optimizer_has_no_variables_yet(backend: str) -> None:
    command = (*TORCH_LOOP, "20", "0.03", "3")
    job = train_and_kill(3, [1], "--min-np", "2", command=command, committed=KILLED_AT)
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]


def learn_digits(ranks: int, *options: str) -> str:
    """What is said of a training with rank 0 killed in it."""
    with started("--verbose", "-np", str(ranks), "--min-np", "1", command=(*DIGITS, *options)) as job:
        job.wait_for(lambda: "Epoch 2/" in job.output)
        job.kill(0)
        output = job.end()
    assert job.process.returncode == 0, output
    assert f"continuing with {ranks - 1} of {ranks} ranks" in output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_the_digits_go_on_though_a_rank_is_killed(backend: str) -> None:
    assert re.search(r"test accuracy [89]\d", learn_digits(2, "--epochs", "8"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow"], indirect=True)
def test_the_digits_are_learned_though_a_rank_is_killed(backend: str) -> None:
    assert re.search(r"test accuracy 9[789]", learn_digits(3, "--epochs", "80"))
