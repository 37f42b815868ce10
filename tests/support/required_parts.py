"""A pytest plugin for CI: a test that was skipped counts as failed, so that a missing part is not taken for a pass.

Load it with `PYTHONPATH=tests pytest -p required_parts`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest

#: A skip is fine if its reason begins with one of these: what the machine that runs CI cannot have.
ALLOWED = ("no GPU", "no /dev/fuse")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def judge(report: Report) -> Report:
    """Turn a skip for any other reason into a failure that tells it."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED):
            report.outcome = "failed"
            report.longrepr = f"skipped, but CI must run it: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge the skip of a test."""
    return judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge the skip of a whole file."""
    return judge((yield))
