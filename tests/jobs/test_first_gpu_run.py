"""The run on the first GPU outlives stages that fail, hang, or write nothing, and leaves none of their processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.first_gpu.run import Outcome, run_stage
from benchmarks.first_gpu.stages import RESULT, Stage


def run(folder: Path, program: str, *, limit_s: float = 60, left_s: float = 100, kind: str = "facts") -> Outcome:
    stage = Stage("one", "a stage", ["-c", program, RESULT], kind, limit_s, needs=())
    return run_stage(stage, sys.executable, os.environ, folder, left_s)


WRITE = "import sys; open(sys.argv[1], 'w').write({!r})"


def test_a_result_is_read(tmp_path: Path) -> None:
    outcome = run(tmp_path, WRITE.format('{"a": 1}'))
    assert (outcome.state, outcome.result, outcome.tail) == ("done", {"a": 1}, [])


@pytest.mark.parametrize(
    ("program", "kind", "why"),
    [
        ("import sys; print('spoken'); sys.exit(3)", "facts", "exit code 3"),
        ("print('spoken')", "facts", "it wrote no result"),
        (WRITE.format("{") + "; print('spoken')", "facts", "its result cannot be read: Expecting property name"),
        (WRITE.format("<testsuite/>") + "; print('spoken')", "tests", "its result cannot be read: no test was chosen"),
    ],
)
def test_a_stage_that_fails_is_reported_with_its_output(program: str, kind: str, why: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, program, kind=kind)
    assert outcome.state == "failed" and outcome.why.startswith(why)
    assert outcome.tail[-1] == "spoken"


def test_a_stage_whose_tests_are_all_skipped_is_not_done(tmp_path: Path) -> None:
    case = '<testcase name="a" time="1"><skipped message="no GPU"/></testcase>'
    outcome = run(tmp_path, WRITE.format(f"<testsuite>{case}{case}</testsuite>"), kind="tests")
    assert (outcome.state, outcome.why) == ("skipped", "no GPU")
    passed = run(tmp_path, WRITE.format(f"<testsuite>{case}<testcase name='b'/></testsuite>"), kind="tests")
    assert passed.state == "done"


def test_a_stage_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    program = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    outcome = run(tmp_path, program, limit_s=2)
    assert (outcome.state, outcome.why) == ("too slow", "it was ended after 2 s")
    child = Path(f"/proc/{outcome.tail[-1]}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_stage_without_time_or_packages_is_not_run(tmp_path: Path) -> None:
    assert run(tmp_path, "", left_s=1).why == "no time is left"
    stage = Stage("one", "a stage", ["-c", ""], "facts", 60, needs=("no_such_package",))
    assert run_stage(stage, sys.executable, os.environ, tmp_path, 100).why == "no_such_package is not installed"
