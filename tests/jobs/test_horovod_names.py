"""The documentation lists every public name of Horovod that hvdkit leaves out, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from engines import require_horovod

PAGE = Path(__file__).parents[2] / "docs" / "comparisons" / "horovod.md"
SECTION = "## Names of Horovod that are left out"


def left_out() -> list[str]:
    """The patterns in the first column of the page's table."""
    text = PAGE.read_text().partition(SECTION)[2].partition("\n#")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.horovod_core
def test_the_documentation_lists_the_names_that_are_left_out() -> None:
    require_horovod()
    script = Path(__file__).parents[1] / "support" / "horovod_names.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    names, patterns = set(done.stdout.split()), left_out()
    assert len(names) > 30
    assert {name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)} == set()
    assert {pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)} == set()
