"""What a step of the planned path costs in instructions: more than a tenth above the record fails. No seconds here.

The record depends on the version of Python; renew it, on a change that is meant, with

    HVDKIT_TEST_RECORD=1 pytest -m slow tests/jobs/test_step_instructions.py

valgrind counts the same instructions on every run and on a machine as busy as can be. The kernel's counters (perf stat)
would be quicker and are missing in most virtual machines.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "data" / "step_instructions.json"
SCRIPT = Path(__file__).parents[1] / "support" / "step_instructions.py"
FEW, MANY = 2, 22
TOLERANCE = 0.10
PYTHON = platform.python_version()  # to the last digit: builds of one minor version are up to a tenth apart


def count_instructions() -> int:
    """Instructions of one step of two ranks; starting Python and opening the plan are in both runs and cancel out."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", sys.executable]
    start = functools.partial(
        subprocess.Popen[str], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    runs = [start([*command, str(SCRIPT), str(steps)]) for steps in (FEW, MANY)]
    try:
        said = [run.communicate(timeout=100)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    found = [re.search(r"I +refs: +([\d,]+)", text) for text in said]
    ended = [run.returncode for run in runs]
    assert all(found) and not any(ended), f"the steps ended with {ended}:\n" + "\n".join(said)
    few, many = (int(one[1].replace(",", "")) for one in found if one)
    return (many - few) // (MANY - FEW)


@pytest.mark.slow
def test_a_step_takes_no_more_instructions_than_recorded() -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is missing; install it (apt-get install valgrind)")
    records = json.loads(RECORD.read_text())
    if os.environ.get("HVDKIT_TEST_RECORD"):
        RECORD.write_text(json.dumps({**records, PYTHON: count_instructions()}, indent=1, sort_keys=True) + "\n")
        return
    if PYTHON not in records:
        pytest.skip(
            f"{RECORD.name} has no number for Python {PYTHON}; make it with the code as it was before your change: "
            f"HVDKIT_TEST_RECORD=1 pytest -m slow {Path(__file__).name}"
        )
    recorded, counted = records[PYTHON], count_instructions()
    change = counted / recorded - 1
    assert abs(change) <= TOLERANCE, (
        f"A step of the planned path takes {counted} instructions, {recorded} are recorded for Python {PYTHON}: "
        f"{100 * change:+.1f} %, and {100 * TOLERANCE:.0f} % are let pass. If that is meant, or it is less, renew the "
        f"record: HVDKIT_TEST_RECORD=1 pytest -m slow tests/{Path(__file__).name}"
    )
