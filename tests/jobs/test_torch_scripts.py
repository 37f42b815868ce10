"""Scripts for torchrun run under hvdrun as they are, and train as one process does on whole batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hvdrun_job import HVDRUN, environment
from torchrun_scripts.problem import train_alone

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parents[1] / "support" / "torchrun_scripts"
TIMEOUT_S = 100
NEEDS = {"accelerated.py": "accelerate", "lightning_fit.py": "lightning"}

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.native("the scripts reduce by torch's own Gloo, or by hvdkit's backend"),
    pytest.mark.group("jobs"),
]


def run_script(name: str, ranks: int, *options: str, **variables: str) -> list[dict[str, Any]]:
    """Run a script under hvdrun with these options; returns what each rank reports, by rank."""
    command = [*HVDRUN, "-np", str(ranks), *options, sys.executable, str(SCRIPTS / name)]
    environ = {**environment(), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_reports(done.stdout)


def read_reports(output: str) -> list[dict[str, Any]]:
    """Take the lines of JSON, without hvdrun's prefix, in the order of ranks."""
    reports = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"rank"' in line]
    return sorted(reports, key=lambda report: int(report["rank"]))


def check_reports(reports: list[dict[str, Any]], ranks: int) -> None:
    assert [(report["rank"], report["size"]) for report in reports] == [(rank, ranks) for rank in range(ranks)]
    alone = train_alone()
    for report in reports:
        assert report["weights"] == pytest.approx(alone, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ddp.py", 3),
        pytest.param("fsdp2.py", 2, marks=pytest.mark.slow),
        pytest.param("accelerated.py", 2, marks=pytest.mark.slow),
        pytest.param("lightning_fit.py", 2, marks=pytest.mark.slow),
    ],
)
def test_a_script_for_torchrun_trains_as_one_process(name: str, ranks: int) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    check_reports(run_script(name, ranks), ranks)


@pytest.mark.slow
def test_accelerate_takes_hvdkit_by_one_option_of_hvdrun() -> None:
    pytest.importorskip("accelerate")
    reports = run_script("accelerated.py", 2, "--mpi-backend")
    check_reports(reports, 2)
    assert {report["backend"] for report in reports} == {"hvdkit"}


@pytest.mark.slow
def test_keras_distribution_finds_the_ranks() -> None:
    reports = run_script("keras_jax.py", 2, JAX_PLATFORMS="cpu")
    assert [(each["rank"], each["size"], each["ranks"]) for each in reports] == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def test_contradicting_variables_are_refused_before_a_rank_starts(tmp_path: Path) -> None:
    trace = tmp_path / "started"
    command = [*HVDRUN, "-np", "2", "touch", str(trace)]
    done = subprocess.run(
        command, env={**os.environ, "WORLD_SIZE": "8"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2 and not trace.exists()
    assert "WORLD_SIZE=8 (2)" in done.stderr and "Run: unset WORLD_SIZE" in done.stderr


def test_a_wrapped_script_sees_one_process() -> None:
    show = "import os; print(*sorted({'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'HOROVOD_RANK'} & set(os.environ)), 'end')"
    for options, shown in ((["--wrap"], "end"), ([], "HOROVOD_RANK MASTER_ADDR RANK WORLD_SIZE end")):
        command = [*HVDRUN, "-np", "1", *options, sys.executable, "-c", show]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert shown == done.stdout.strip().removeprefix("[0]").strip(), done.stderr
