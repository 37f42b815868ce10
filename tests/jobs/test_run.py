"""hvdkit.run(): what the function returns or raises on the ranks comes back."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hvdrun_job import environment

from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.launch.function_outcome import FunctionOutcome, describe_error
from hvdkit.launch.function_results import Result, find_last, give_results
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.run_api import launch, run

pytestmark = pytest.mark.group("jobs")


def result(rank: int, seconds: float, error: Exception | None = None, value: Any = None) -> Result:
    outcome = FunctionOutcome(value) if error is None else describe_error(error, pickle.dumps)
    return Result(rank, "a", seconds, outcome.raised, pickle.dumps(outcome))


def test_the_error_of_the_rank_that_failed_first_is_raised_and_none_that_follows_from_it() -> None:
    follows, first, second = RankLostError("rank 1 is lost"), KeyError("cause"), ValueError("later")
    left = [result(0, 1.0, follows), result(1, 2.0, first), result(2, 3.0, second)]
    with pytest.raises(KeyError) as caught:
        give_results(left, 4, 1, "here")
    assert "The function failed on rank 1 on a" in str(caught.value.__cause__)
    with pytest.raises(RankLostError):  # of a rank that was killed
        give_results(left[:1], 3, 137, "here")
    with pytest.raises(HorovodInternalError, match="ended with exit code 137"):
        give_results([], 3, 137, "here")
    with pytest.raises(HorovodInternalError, match="Rank 1 left no result in here"):
        give_results([result(0, 1.0)], 2, 0, "here")
    assert give_results([result(0, 2.0, value="a"), result(1, 1.0, value="b")], 2, 0, "here") == ["a", "b"]


def test_a_function_that_was_called_already_starts_no_job() -> None:
    with pytest.raises(TypeError, match=r"needs a function, not dict: run\(train, args="):
        run({"weight": 1.0}, np=2)  # type: ignore[arg-type]


SCRIPT = """
import sys, threading
import hvdkit, hvdkit.torch as hvd
import torch

class TakesTwo(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

def fail(how):
    hvd.init()
    if hvd.rank() == 1:
        if how == "lock":
            return threading.Lock()
        if how == "exit":
            sys.exit(0)
        raise TakesTwo("one", "two") if how == "two" else FileNotFoundError(2, "of the function")
    hvd.allreduce(torch.ones(1), name="nobody comes")

if __name__ == "__main__":
    for how in sys.argv[1:]:
        try:
            hvdkit.run(fail, (how,), np=3)
        except Exception as error:
            cause = str(error.__cause__)
            place = "rank 1 on" in cause, "in fail" in cause, "run_worker" in cause
            print(how, type(error).__name__, repr(str(error)), *place)
"""


@pytest.mark.ranks
@pytest.mark.slow  # the quick tier has an error that the function raises in test_launch_of_a_function_and_of_a_command
@pytest.mark.parametrize("how", [["file", "two", "exit", "lock"]])
def test_what_the_function_raises_is_raised_by_run(tmp_path: Path, how: list[str]) -> None:
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), *how], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    said = {
        "file": "file FileNotFoundError '[Errno 2] of the function' True True False",
        "two": "two RuntimeError 'TakesTwo: one and two' True True False",
        "exit": "exit RuntimeError 'SystemExit: 0' True True False",
        "lock": 'lock TypeError "The function returned a lock, which cannot be pickled: TypeError: cannot pickle '
        "'_thread.lock' object\" True False False",
    }
    assert done.stdout.splitlines() == [said[one] for one in how], done.stdout + done.stderr
    if how == ["file"]:
        shown = done.stderr.partition("failed with FileNotFoundError")[2].partition("FileNotFoundError:")[0]
        assert "in fail" in shown and "runpy" not in shown and "run_worker" not in shown, done.stderr


def test_of_an_elastic_job_the_ranks_of_the_last_start_count() -> None:
    first = [result(0, 1.0, value="old"), result(1, 1.0, KeyError("lost"))]
    last = [result(rank, 2.0, value=rank)._replace(start=2) for rank in (1, 0)]
    assert [each.get() for each in find_last([*first, *last])] == [0, 1]
    assert find_last(first[1:]) == []


def test_launch_takes_a_function_or_words() -> None:
    wrongs: list[Any] = ["train.py", [], {"weight": 1.0}]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="needs a function and its arguments, or a list of words"):
            launch(LaunchOptions(np=2), wrong)


LAUNCH = """
import sys, hvdkit

def train(factor, fails=None):
    import hvdkit.torch as hvd
    import torch
    hvd.init()
    if hvd.rank() == fails:
        raise FileNotFoundError(2, "of the function")
    return factor * int(hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum)), hvd.rank()

if __name__ == "__main__":
    options = hvdkit.LaunchOptions(np=3, quiet=True)
    print(hvdkit.launch(options, train, 10))
    print(hvdkit.launch(options, [sys.executable, "-S", "-c", "pass"]))
    for target, arguments in ((train, (1, 1)), ([sys.executable, "-S", "-c", "raise SystemExit(3)"], ())):
        try:
            hvdkit.launch(options, target, *arguments)
        except Exception as error:
            print(type(error).__name__, error, "rank 1 on" in str(error.__cause__))
    try:
        hvdkit.launch(hvdkit.LaunchOptions(hosts="localhost:1", np=2), ["true"])
    except hvdkit.LaunchError as error:
        print(error)
"""


@pytest.mark.ranks
def test_launch_of_a_function_and_of_a_command(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(LAUNCH)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines()[:4] == [
        "[(30, 0), (30, 1), (30, 2)]",
        "None",
        "FileNotFoundError [Errno 2] of the function True",
        "HorovodInternalError The job ended with exit code 3; its output says why. False",
    ], done.stdout + done.stderr
    assert done.stdout.splitlines()[4].startswith("-np 2 is more than the 1 slot of localhost:1."), done.stderr


ELASTIC = """
import os, sys, hvdkit

def train(folder):
    import hvdkit.torch as hvd
    import torch
    hvd.init()
    died = os.path.join(folder, "died")
    if hvd.rank() == 1 and not os.path.exists(died):
        open(died, "w").close()
        os.kill(os.getpid(), 9)
    return hvd.rank(), int(hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum))

if __name__ == "__main__":
    options = hvdkit.LaunchOptions(np=3, min_np=2, elastic=hvdkit.Elasticity.RESTART)
    print(hvdkit.launch(options, train, sys.argv[1]))
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_launch_returns_what_the_ranks_of_the_last_start_returned(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "[(0, 3), (1, 3), (2, 3)]\n", done.stderr
    assert "starting again with 3 ranks" in done.stderr
