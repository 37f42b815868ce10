"""`python -m benchmarks`: what comes of a part is shown, whether it succeeds or not; nothing is measured."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import build_text
from benchmarks.allreduce import COPIES
from benchmarks.allreduce import judge as judge_allreduce
from benchmarks.parts import PARTS, Done, Part, build_command, run_part
from benchmarks.rows import Row, read_rows, show_rows, write_rows
from benchmarks.strategies import build_table

ROWS = [
    Row("step", "hvdkit", 0.0497, 1.04, "no communication", "at most x1.05", True),
    Row("step", "Gloo", 0.084, 1.72, "no communication"),
    Row("4 KiB", "hvdkit", 70e-6, None, "", "under 60 us", False),
    Row("memory", "resident", None, mb=12.3),
]

SCRIPT = """
import sys
from pathlib import Path
from benchmarks.rows import Row, write_rows
if sys.argv[1] == "good":
    write_rows(Path(sys.argv[3]), "here", [Row("w", "p", 1.0)])
elif sys.argv[1] == "bad":
    print("what went wrong")
    sys.exit(3)
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables with which the module `script` is found."""
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return {**os.environ, "PYTHONPATH": path}


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", "here", ROWS)
    assert read_rows(tmp_path / "rows.json") == ("here", ROWS)


def test_a_miss_is_marked_as_one() -> None:
    lines = show_rows(ROWS).splitlines()[2:]
    assert lines == [
        "| step | hvdkit | 49.7 ms | x1.04 | no communication | at most x1.05 |",
        "| step | Gloo | 84.0 ms | x1.72 | no communication |  |",
        "| 4 KiB | hvdkit | 70.0 us |  |  | under 60 us, missed |",
        "| memory | resident | 12 MB |  |  |  |",
    ]


def test_a_part_that_succeeds_fails_or_says_nothing(scripts: dict[str, str]) -> None:
    good, bad, silent = (
        run_part(Part(name, "", ("script", name), ranks=0, needs=()), scripts) for name in ("good", "bad", "silent")
    )
    assert (good.state, good.where, good.rows) == ("done", "here", [Row("w", "p", 1.0)])
    assert bad.state == "failed"
    assert "exit code 3" in bad.why
    assert "what went wrong" in bad.why
    assert silent.state == "failed", "no rows are no success"


def test_a_part_that_cannot_be_run_here_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run_part(Part("a", "", ("x",), root=True), {}).why.startswith("needs root")
    done = run_part(Part("b", "", ("x",), needs=("no_such_package",)), {})
    assert (done.state, done.why) == ("not run", "needs no_such_package")


def test_the_text_tells_misses_failures_and_what_was_not_run() -> None:
    text = build_text(
        {"processor": "P", "torch": "2"},
        [
            Done("step", "done", rows=ROWS, seconds=9),
            Done("start", "failed", "ended"),
            Done("nodes", "not run", "root"),
        ],
    )
    for line in ("1 of 2 aims are met.", "Missed: 4 KiB, hvdkit (under 60 us)", "start: failed: ended"):
        assert line in text.splitlines()
    assert "nodes: not run: root" in text


def test_ranks_are_started_by_hvdrun_unless_the_part_starts_its_own() -> None:
    rows = Path("rows.json")
    started = build_command(PARTS[0], rows)
    assert started[1:] == [
        *("-m", "hvdkit.launch", "-np", "2", sys.executable, "-m", "benchmarks.step_time"),
        *("--json", "rows.json"),
    ]
    assert build_command(Part("own", "", ("benchmarks.own",), ranks=0), rows)[1:3] == ["-m", "benchmarks.own"]


def test_an_allreduce_is_judged_by_what_the_peers_take() -> None:
    assert judge_allreduce("Open MPI", 2.9) == ("at least x3", False)
    assert judge_allreduce("Gloo", 4.0) == ("at least x4", True)
    assert judge_allreduce(COPIES, 0.4) == ("at least x0.5", False)
    assert judge_allreduce("hvdkit, in bucket", 1.0) == ("", None)


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("agreement", "--ranks 0", "0 is not a whole number of at least 1"),
        ("federated_cost", "--nonsense", "unrecognized arguments: --nonsense"),
        ("nodes", "--steps 0", "0 is not a whole number of at least 1"),
        ("recovery", "--rounds no", "no is not a whole number of at least 1"),
        ("scaling_model", "--hosts 1", "use 2 or more"),
        ("strategies", "--ranks 1", "use 2 or more"),
        ("strategies", "--times nan", "nan is not a number of more than 0"),
    ],
)
def test_arguments_are_refused_before_anything_is_measured(
    module: str, arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{module}").main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_strategies_are_compared_with_the_first_one() -> None:
    slow = {"name": "a", "points": [(0.0, 2.0), (2.0, 0.29), (4.0, 0.1)], "accuracy": 0.95, "predicted": 1.0}
    fast = {"name": "b", "points": [(0.0, 2.0), (2.0, 0.4)], "accuracy": 0.9, "predicted": None}
    assert build_table([slow, fast]).splitlines()[2:] == [
        "| a | 4.0 | x1.00 | x1.00 | 2.0 | 0.100 | 95.0 % |",
        "| b | 2.0 | x2.00 |  | not reached | 0.400 | 90.0 % |",
    ]
