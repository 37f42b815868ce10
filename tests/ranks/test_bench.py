"""What hvdkit bench makes of times, of files and of its options: pure functions, nothing measured."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import product
from ranks import run_ranks
from rich.console import Console

from hvdkit.cli import build_parser, main
from hvdkit.errors import BenchError, MissingDependencyError
from hvdkit.tools.bench import run as bench_run
from hvdkit.tools.bench import show
from hvdkit.tools.bench.command import build_plan
from hvdkit.tools.bench.report import (
    AS_BACKEND,
    IN_BUCKET,
    OURS,
    Case,
    Plan,
    Report,
    bandwidths,
    bus_factor,
    compare,
    failed,
    read_report,
    show_bytes,
    show_time,
    summarise,
    write_report,
)
from hvdkit.tools.bench.show import list_rows, print_report
from hvdkit.tools.charts import check_plot

STEADY = (1.0, 1.1, 0.9, 1.0, 1.08)


def make_report(kind: str = "allreduce", scale: float = 1.0, peer: str = "Gloo") -> Report:
    """hvdkit's times, and a peer's that are 3 times as long."""
    sizes = {"4 KiB": (4096, 1e-5), "1 MiB": (2**20, 1e-3)}
    cases = [
        Case(work, nbytes, {OURS: [scale * unit * one for one in STEADY], peer: [3 * unit * one for one in STEADY]})
        for work, (nbytes, unit) in sizes.items()
    ]
    return Report(kind, OURS, 4, "float32", "4 ranks", {"processor": "P", "torch": "2"}, ["[x] left out"], cases)


def scaled(report: Report, peer: str, factor: float) -> Report:
    cases = [
        replace(case, times={**case.times, peer: [factor * one for one in case.times[peer]]}) for case in report.cases
    ]
    return replace(report, cases=cases)


def test_medians_quartiles_and_ratios_within_rounds() -> None:
    found = summarise({"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [2.0, 2.0, 9.0, 4.0, 5.0]}, base="a")
    assert (found["a"].median_s, found["a"].low_s, found["a"].high_s, found["a"].ratio) == (3, 2, 4, 1)
    assert found["b"].median_s == 4
    assert found["b"].ratio == 1, "the median of 2, 1, 3, 1, 1, not that of medians"
    assert summarise({"a": [7.0]}, base="a")["a"].high_s == 7


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert {kind: bus_factor(kind, 4) for kind in ("allreduce", "allgather", "reducescatter", "alltoall")} == {
        "allreduce": 1.5,
        "allgather": 0.75,
        "reducescatter": 0.75,
        "alltoall": 0.75,
    }
    assert bus_factor("broadcast", 4) == 1
    report = make_report()
    assert bandwidths(report, report.cases[1], 1e-3) == pytest.approx((2**20 * 1e3, 1.5 * 2**20 * 1e3))


def test_numbers_for_people() -> None:
    assert [show_bytes(one) for one in (12, 4096, 1536, 2**20, 3 * 2**30)] == [
        "12 B",
        "4 KiB",
        "1.5 KiB",
        "1 MiB",
        "3 GiB",
    ]
    assert [show_time(one) for one in (4.123e-6, 0.0482, 0.00099961, 1.3, 123)] == [
        "4.12 us",
        "48.2 ms",
        "1.00 ms",
        "1.30 s",
        "123 s",
    ]


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = make_report()
    write_report(report, tmp_path / "run.json")
    assert read_report(tmp_path / "run.json") == report
    row = json.loads((tmp_path / "run.json").read_text())["rows"][1]
    assert (row["work"], row["peer"], row["ratio"]) == ("4 KiB", "Gloo", pytest.approx(3))
    assert row["bus_bytes_s"] == pytest.approx(1.5 * row["algorithm_bytes_s"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "hvdkit bench 1"}', '{"format": "other"}'])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BenchError, match="is no result of hvdkit bench"):
        read_report(tmp_path / "other.json")
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        read_report(tmp_path / "missing.json")


def test_only_what_is_beyond_noise_is_slower() -> None:
    report = make_report()
    found = compare(report, scaled(report, OURS, 1.05))
    assert [change.noise for change in found] == [True] * 4, "5 % while the middle half of the rounds is 8 % wide"
    slow = compare(report, scaled(report, OURS, 1.3))
    assert [(change.peer, change.slower) for change in slow] == [(OURS, True), ("Gloo", False)] * 2
    assert slow[0].percent == pytest.approx(30)
    fast = compare(report, scaled(report, OURS, 0.5))
    assert not fast[0].slower
    assert not fast[0].noise


def test_failing_is_for_hvdkits_own_and_above_what_was_asked() -> None:
    report = make_report(peer=IN_BUCKET)
    slow = compare(report, scaled(report, IN_BUCKET, 1.3))
    assert [change.peer for change in failed(slow, 20)] == [IN_BUCKET] * 2
    assert failed(slow, 40) == []
    other = make_report()
    assert failed(compare(other, scaled(other, "Gloo", 9)), 20) == [], "a peer that is slower is no fault of hvdkit's"
    assert failed(compare(other, scaled(other, OURS, 1.05)), 0) == [], "noise is none either"


def test_runs_of_different_things_are_not_compared() -> None:
    report = make_report()
    with pytest.raises(BenchError, match="has ranks 4, and this run 2"):
        compare(report, replace(report, ranks=2))
    with pytest.raises(BenchError, match="none of the sizes or models"):
        compare(report, replace(report, cases=[replace(report.cases[0], work="64 B")]))


def test_the_table_has_a_row_for_each_size_and_peer_and_marks_what_is_slower() -> None:
    report = make_report()
    changes = compare(report, scaled(report, OURS, 1.3))
    row = {"size": "4 KiB", "peer": OURS, "median": "10.0 us", "spread": "4 %", "GB/s": "0.41", "bus GB/s": "0.61"}
    row["ratio"] = "x1.00"
    assert list_rows(report, [])[0] == row
    assert list_rows(report, changes)[0] == {**row, "since": "+30 % slower"}
    assert list(list_rows(report, [])[3].values())[:4] == ["1 MiB", "Gloo", "3.00 ms", "4 %"]
    output = io.StringIO()
    print_report(report, changes, Console(file=output, width=80))
    assert "…" not in output.getvalue(), "it fits into 80 columns"
    longest, widest = make_report(peer=AS_BACKEND), io.StringIO()
    print_report(longest, compare(longest, scaled(longest, AS_BACKEND, 3.6)), Console(file=widest, width=80))
    assert "…" not in widest.getvalue() and "+260 % slower" in widest.getvalue(), "also with the longest peer"
    text = " ".join(output.getvalue().split())
    assert "[x] left out" in text
    assert "Slower than the baseline by more than noise: hvdkit, 4 KiB: +30 %; hvdkit, 1 MiB: +30 %." in text


@pytest.mark.parametrize(
    ("kind", "name"),
    product(
        ["allreduce", "step"], ["run.png", "run.svg"], quick=lambda kind, name: (kind, name) == ("step", "run.svg")
    ),
)
def test_a_plot_is_a_picture_of_every_peer(kind: str, name: str, tmp_path: Path) -> None:
    report = make_report(kind)
    if kind == "step":
        report = replace(report, cases=[replace(case, nbytes=0) for case in report.cases])
    show.write_plot(report, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG") if name == "run.png" else b"<!-- Gloo -->" in data


def test_what_would_fail_at_the_end_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(bench_run, "read_world", lambda: SimpleNamespace(launcher="none"))
    for words, message in {
        ("--plot", "x.gif"): "Use .svg, .png, .pdf",
        ("--output", str(tmp_path / "no" / "x.json")): "does not exist. Make it first",
        ("--fail-over", "20"): "--baseline FILE",
        ("--baseline", str(tmp_path / "none.json")): "cannot be read",
    }.items():
        assert main(["bench", "allreduce", *words]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["bench", "allreduce", "--output", str(tmp_path / "x.json")]) == 2
    assert "x.json cannot be written: permission denied" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hvdkit\[plot\]'"):
        check_plot(show.PLOT, tmp_path / "x.png")


def test_options_make_a_plan_and_the_rest_is_hvdruns() -> None:
    words = ["--sizes", "4K,1m", "-np", "4", "--hostfile", "h", "--rounds", "3", "--tcp", "--mpi-args=-x A", "--alone"]
    options = build_parser().parse_args(["bench", "alltoall", *words])
    assert build_plan(options) == Plan("alltoall", sizes=(4096, 2**20), rounds=3, alone=True)
    passed = [word for option in options.hvdrun for word in option.words]
    assert passed == ["-np", "4", "--hostfile=h", "--tcp", "--mpi-args=-x A"]


@pytest.mark.parametrize(
    "words",
    [
        ["bench"],
        ["bench", "everything"],
        ["bench", "step", "--rounds", "0"],
        ["bench", "step", "--seconds", "nan"],
        ["bench", "step", "--fail-over", "-1"],
        ["bench", "allreduce", "--sizes", "-4K"],
        ["bench", "allreduce", "-np", "0"],
    ],
)
def test_what_cannot_be_measured_is_refused(words: Sequence[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(words)


def test_a_rank_of_another_launcher_starts_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "read_world", lambda: SimpleNamespace(launcher="slurm", rank=1))
    assert main(["bench", "allreduce", "-np", "4"]) == 2
    assert "slurm has started this rank already, so -np cannot start any" in capsys.readouterr().err


def test_json_is_one_document_that_a_baseline_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = make_report()
    monkeypatch.setattr(bench_run, "start_ranks", lambda *_: report)
    monkeypatch.setattr(bench_run, "read_world", lambda: SimpleNamespace(launcher="none"))
    write_report(report, tmp_path / "before.json")
    assert main(["bench", "allreduce", "--json", "--baseline", str(tmp_path / "before.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"format", "kind", "machine", "cases", "rows", "changes"} <= document.keys()
    (tmp_path / "printed.json").write_text(json.dumps(document))
    assert read_report(tmp_path / "printed.json") == report


@pytest.mark.parametrize("device, command", [("cpu", "hvdkit build-horovod."), ("cuda", "--gpu-operations nccl.")])
def test_where_horovod_is_missing_a_step_says_how_to_get_it(
    device: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    horovod_job = pytest.importorskip("hvdkit.tools.bench.horovod_job", reason="torch is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with horovod_job.beside_horovod(1, device) as (job, notes):
        assert job is None
    assert "not installed" in notes[0] and notes[0].endswith(command)


def _start_a_horovod_that_fails() -> str:
    """Why there is no job of Horovod's ranks, where these end as they do if they cannot be imported."""
    import hvdkit.torch as hvd
    from hvdkit.tools.bench import horovod_job

    start = horovod_job._start
    hvd.init()
    try:
        horovod_job._start = lambda *_: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        horovod_job.HorovodJob()
    except BenchError as error:
        return str(error)
    finally:
        horovod_job._start = start
        hvd.shutdown()
    return "it came up"


@pytest.mark.ranks
def test_ranks_of_horovod_that_fail_at_their_start_are_told_when_they_have_ended() -> None:
    for said in run_ranks(2, _start_a_horovod_that_fails):
        assert "2 of its 2 ranks did not come up before their job ended with exit code 3" in said
