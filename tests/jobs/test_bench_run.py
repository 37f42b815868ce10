"""hvdkit bench as a user starts it: real ranks, few rounds. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import require_horovod

from hvdkit.tools.bench.report import HOROVOD, IN_BUCKET, NO_COMMUNICATION, OURS, read_report, write_report

pytest.importorskip("torch", reason="torch is not installed")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=os.environ, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_an_allreduce_beside_its_peers_and_a_baseline(tmp_path: Path) -> None:
    short = ("bench", "allreduce", "-np", "2", "--sizes", "4K,64K", "--rounds", "2", "--seconds", "0.01")
    done = run(tmp_path, "hvdkit", *short, "--output", "first.json", "--plot", "first.svg")
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "first.json")
    assert (report.ranks, report.kind, [case.work for case in report.cases]) == (2, "allreduce", ["4 KiB", "64 KiB"])
    assert {OURS, IN_BUCKET, "Gloo"} <= set(report.peers())
    for case in report.cases:
        assert all(len(times) == 2 and min(times) > 0 for times in case.times.values())
    assert "4 KiB" in done.stdout
    assert "[0]" not in done.stdout, "the table is the command's own, not a rank's"
    assert "<svg" in (tmp_path / "first.svg").read_text()

    quick = [{**case.times, OURS: [1e-9, 1e-9]} for case in report.cases]
    for case, times in zip(report.cases, quick, strict=True):
        object.__setattr__(case, "times", times)
    write_report(report, tmp_path / "quick.json")
    again = run(tmp_path, "hvdkit", *short, "--alone", "--baseline", "quick.json", "--fail-over", "20")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "Slower than the baseline by more than noise: hvdkit, 4 KiB" in again.stdout
    assert "Gloo" not in again.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_on_ranks_that_hvdrun_has_started_already(tmp_path: Path) -> None:
    words = ("bench", "step", "--models", "small layers", "--rounds", "1", "--alone", "--output", "step.json")
    hvdrun = ("hvdkit.launch", "-np", "2", sys.executable, "-m", "hvdkit")
    done = run(tmp_path, *hvdrun, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [(row["work"], row["peer"]) for row in rows] == [
        ("101 small layers", NO_COMMUNICATION),
        ("101 small layers", OURS),
    ]
    assert done.stdout.count("101 small layers") == 2, "rank 0 prints, and no other"


@pytest.mark.horovod_core
@pytest.mark.ranks
def test_a_step_beside_horovod(tmp_path: Path) -> None:
    require_horovod()
    words = ("bench", "step", "-np", "2", "--models", "small layers", "--rounds", "1", "--output", "step.json")
    done = run(tmp_path, "hvdkit", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "step.json")
    assert report.peers() == [NO_COMMUNICATION, OURS, "DDP (Gloo)", HOROVOD] and not report.notes


@pytest.mark.ranks
def test_ranks_that_fail_are_no_result(tmp_path: Path) -> None:
    done = run(tmp_path, "hvdkit", "bench", "step", "-np", "2", "--transport", "single", "--alone")
    assert done.returncode == 2
    assert "The ranks ended with exit code" in done.stderr


def test_a_wrong_name_of_a_model_or_a_file_starts_no_ranks(tmp_path: Path) -> None:
    for words, message in (
        (["step", "--models", "nothing like it"], "No model's name contains nothing like it. The models are: MLP"),
        (["allreduce", "--output", "."], ". is a folder"),
    ):
        done = run(tmp_path, "hvdkit", "bench", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
