"""Ranks started by hvdrun, and what their rank 0 tells, line by line through hvdrun's output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from hvdkit.config import read_environment
from hvdkit.errors import BenchError
from hvdkit.launch.where import find_hosts
from hvdkit.tools.bench.here import check_framework
from hvdkit.tools.bench.plan import Plan, Tell
from hvdkit.tools.bench.report import Report, decode_report

MARK = "hvdkit-bench:"
_LINE = re.compile(rf"(?:\[[^\]]*\] )?{MARK}(.*)")
_SAYS_WHERE = ("-np", "--num-proc", "-H", "--hosts", "--hostfile", "-hostfile", "--config-file")


def start_ranks(plan: Plan, flags: Sequence[str], tell: Tell) -> Report:
    """Measure the plan on ranks that hvdrun starts. flags: hvdrun's.

    Raises BenchError if they fail; what they have printed is on stderr by then.
    """
    check_framework(plan)
    command = [sys.executable, "-m", "hvdkit.launch", *plan_flags(flags)]
    command += [sys.executable, "-m", "hvdkit.tools.bench.started", json.dumps(asdict(plan))]
    report = None
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is None:
                sys.stderr.write(line)
                continue
            told = json.loads(found[1])
            if "report" in told:
                report = decode_report(told["report"])
            else:
                tell(*told["progress"])
    if job.returncode or report is None:
        raise BenchError(f"The ranks ended with exit code {job.returncode}; what they have printed says why.")
    return report


def plan_flags(flags: Sequence[str]) -> list[str]:
    """The flags for hvdrun: 2 ranks here where neither they nor an allocation say what to start."""
    said = any(flag.partition("=")[0] in _SAYS_WHERE for flag in flags)
    if said or find_hosts(None, None, read_environment()) is not None:
        return list(flags)
    return [*flags, "-np", "2"]
