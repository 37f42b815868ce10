"""Failed tests run once more, alone: beside others on two cores, a few of thousands of tests fail by the load.

A pytest plugin: `-p failed_tests --failed FILE` writes the tests that failed into FILE. `failed_tests.py FILE PASSED`
runs these again, one after the other, and adds those that pass to the file PASSED. Only failed tests are run again: no
file that cannot be collected, no test in which a process of pytest-xdist crashed, and no more than a few.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

#: More have one cause, and it is not the load.
MOST = 8


class Failures:
    """What has failed so far, in the process that has all reports.

    tests: that failed, by node id. rest: what else did, in words.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tests: dict[str, None] = {}
        self.rest: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed, in whichever phase; of a crashed process of pytest-xdist the phase is unknown."""
        if not report.failed:
            return
        if report.when in ("setup", "call", "teardown"):
            self.tests[_without_group(report.nodeid)] = None
        else:
            self.rest.append(f"a process of pytest-xdist crashed in {report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be collected."""
        if report.failed:
            self.rest.append(f"{report.nodeid} cannot be collected")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file."""
        rest = [*self.rest]
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            rest.append(f"pytest ended with exit code {int(exitstatus)}")
        self._path.write_text(json.dumps({"tests": list(self.tests), "rest": rest}))


def _without_group(nodeid: str) -> str:
    """The node id of a test to which pytest-xdist has appended its group: "file::test[1]@ranks"."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --failed."""
    parser.addoption("--failed", metavar="FILE", help="write the tests that failed into FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Take note of failures, but for the processes of pytest-xdist."""
    path = config.getoption("--failed")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)), "failed_tests_failures")


def find_objection(tests: list[str], rest: list[str]) -> str:
    """Why these failures stand without another run; "" if the tests may be run again."""
    if rest:
        return "; ".join(rest)
    if not tests:
        return "pytest failed without a failed test"
    return f"{len(tests)} tests failed, more than {MOST}" if len(tests) > MOST else ""


def run_again(path: Path, passed: Path) -> int:
    """Run the tests in the file again; returns the exit code: 0 if all passed now. passed: a file to name them in."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        print(f"Nothing is run again: pytest has not come to its end ({error}).")
        return 1
    objection = find_objection(found["tests"], found["rest"])
    if objection:
        print(f"Nothing is run again: {objection}.")
        return 1
    print(f"Run again, alone: {', '.join(found['tests'])}", flush=True)
    code = int(pytest.main(["-p", "required_parts", "-n", "0", "-m", "", *found["tests"]]))
    if not code:
        with passed.open("a") as file:
            file.writelines(f"{test}\n" for test in found["tests"])
    return code


if __name__ == "__main__":
    sys.exit(run_again(*map(Path, sys.argv[1:])))
