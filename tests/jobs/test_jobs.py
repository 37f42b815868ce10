"""hvdkit jobs and hvdkit stop: the running jobs of this user on this host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hvdrun_job import SLEEP, environment, read_pids, started

from hvdkit.launch.state.runtime_dir import find_jobs
from hvdkit.tools.jobs import format_jobs

HVDKIT = [sys.executable, "-m", "hvdkit"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HVDKIT, *words], env=environment(), capture_output=True, text=True, timeout=60, check=False)


def list_jobs() -> dict[str, dict[str, Any]]:
    done = run("jobs", "--json")
    assert done.returncode == 0, done.stderr
    return {job["name"]: job for job in json.loads(done.stdout)}


def test_a_table_has_a_line_for_each_job() -> None:
    jobs: list[dict[str, Any]] = [
        {"name": "7", "state": "running", "ranks": 2, "hosts": ["a", "b"], "since": 0.0, "command": "python t.py"},
        {"name": "88", "state": "not responding", "ranks": None, "hosts": None, "since": None, "command": None},
        {"name": "9", "state": "running", "ranks": 8, "hosts": list("abcd"), "since": 0.0, "command": "python t.py"},
    ]
    head, first, second, third = format_jobs(jobs).splitlines()
    assert head.split() == ["JOB", "STATE", "RANKS", "HOSTS", "SINCE", "COMMAND"]
    assert re.fullmatch(r"7 +running +2 +a,b +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +python t.py", first)
    assert re.fullmatch(r"88 +not responding +- +- +- +-", second)
    assert "a and 3 others" in third


def test_a_table_shows_the_gpus_of_jobs_that_have_some() -> None:
    job = {"name": "7", "state": "running", "ranks": 16, "hosts": ["a", "b"], "since": None, "command": "t"}
    jobs = [{**job, "gpus": {"a": "8 AMD", "b": "8 AMD"}}, {**job, "gpus": {"a": "4 NVIDIA"}}, {**job, "gpus": {}}]
    head, *lines = format_jobs(jobs).splitlines()
    assert head.split() == ["JOB", "STATE", "RANKS", "HOSTS", "GPUS", "SINCE", "COMMAND"]
    assert [" ".join(line.split()[4:-2]) for line in lines] == ["2 x 8 AMD", "4 NVIDIA", "-"]


def test_a_table_loses_nothing_of_a_long_command() -> None:
    hosts = [f"node{number}.cluster.example.org" for number in range(3)]
    command = "python -c 'import t\nt.train([bold])'" + "".join(f" --option-{number}" for number in range(100))
    job = {"name": "7", "state": "not responding", "ranks": 3, "hosts": hosts, "since": 0.0, "command": command}
    _, line = format_jobs([job]).splitlines()
    assert line.startswith("7    not responding  3") and line.endswith(f"  {command.replace(chr(10), ' ')}")
    for width in (1, 100, 200):
        head, *narrow = format_jobs([job], width).splitlines()
        assert len(narrow) > 1 and max(map(len, narrow)) <= max(80, width), "continued in its column"
        column = head.index("COMMAND")
        assert "".join(part[column:] for part in narrow).replace(" ", "") == "".join(command.split())
        assert narrow[0].split()[:4] == ["7", "not", "responding", "3"]


SAVES = """
def save(*_):
    print("saves", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "script", "code"),
    [
        pytest.param((), SAVES, 75, id="75", marks=pytest.mark.slow),
        pytest.param((), "", 143, id="143"),
        pytest.param(("--now",), "", 130, id="130", marks=pytest.mark.slow),
    ],
)
def test_a_job_is_listed_and_stopped(options: tuple[str, ...], script: str, code: int) -> None:
    with started(2, script + SLEEP) as hvdrun:
        read_pids(hvdrun, 2)
        name = str(hvdrun.pid)
        job = list_jobs()[name]
        assert (job["state"], job["ranks"], len(job["hosts"])) == ("running", 2, 1)
        assert set(job["gpus"]) <= set(job["hosts"])  # {} without GPUs
        assert job["since"] > 0 and sys.executable in job["command"]
        (line,) = [each for each in run("jobs").stdout.splitlines() if each.split()[0] == name]
        assert line.endswith(job["command"].splitlines()[-1])
        done = run("stop", *options, name)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"Job {name} has ended with exit code {code}.\n", "")
        assert hvdrun.wait(20) == code
        assert name not in find_jobs()


@pytest.mark.ranks
def test_an_unknown_job_is_an_error_with_the_list() -> None:
    with started(1, SLEEP) as hvdrun:
        read_pids(hvdrun, 1)
        done = run("stop", "none")
        assert done.returncode == 2 and done.stderr.startswith("hvdkit stop: You have no job none")
        assert f"  hvdkit stop {hvdrun.pid}    1 rank of " in done.stderr
        assert hvdrun.poll() is None
