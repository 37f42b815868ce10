"""Tests that fail in CI are run once more; what is no failed test is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from failed_tests import MOST, find_objection

TESTS = Path(__file__).parents[1] / "support"

ONCE_AND_TWICE = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("x", ["a::b @c"])
@pytest.mark.xdist_group("some group")
def test_once(x):
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert False

def test_never(): pass
"""
ALWAYS = "def test_always(): assert False\n"
CRASHES = "import os\ndef test_dies(): os._exit(7)\n"


def run(folder: Path, source: str, *options: str) -> tuple[int, int, str, str]:
    """Exit codes of a run of tests and of the second one, what that said, and the tests that it names as passed."""

    def python(*command: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        return subprocess.run(
            [sys.executable, *command], env=env, cwd=folder, capture_output=True, text=True, timeout=100
        )

    (folder / "test_it.py").write_text(source)
    found, passed = folder / "found.json", folder / "passed.txt"
    first = python("-m", "pytest", "-p", "failed_tests", "--failed", str(found), *options)
    second = python(str(TESTS / "failed_tests.py"), str(found), str(passed))
    return first.returncode, second.returncode, second.stdout, passed.read_text() if passed.exists() else ""


def test_a_test_that_fails_once_is_named(tmp_path: Path) -> None:
    parallel = ("-n", "1", "--dist", "loadgroup")
    first, second, said, passed = run(tmp_path, ONCE_AND_TWICE, *parallel)
    assert (first, second) == (1, 0), said
    assert passed == "test_it.py::test_once[a::b @c]\n" and "1 passed" in said


@pytest.mark.slow
def test_a_test_that_fails_again_has_failed(tmp_path: Path) -> None:
    first, second, said, passed = run(tmp_path, ONCE_AND_TWICE + ALWAYS)
    assert (first, second, passed) == (1, 1, "") and "1 failed, 1 passed" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        ("import no_such_module", (), "test_it.py cannot be collected"),
        (CRASHES, ("-n", "1"), "a process of pytest-xdist crashed in test_it.py::test_dies"),
        (CRASHES, (), "pytest has not come to its end"),
    ],
)
def test_what_is_no_failed_test_is_not_run_again(
    tmp_path: Path, source: str, options: tuple[str, ...], why: str
) -> None:
    first, second, said, passed = run(tmp_path, source, *options)
    assert first and second == 1 and "Nothing is run again" in said and why in said and not passed


def test_many_failures_stand() -> None:
    assert not find_objection(["test"] * MOST, [])
    assert find_objection(["test"] * (MOST + 1), []) == "9 tests failed, more than 8"
    assert find_objection([], [])
