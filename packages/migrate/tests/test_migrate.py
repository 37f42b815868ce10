"""hvdkit migrate: what it says about scripts with a trap each, and what it makes of them."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("libcst", reason="libcst is not installed")

from hvdkit_migrate import cli
from hvdkit_migrate.files import MigrateError
from hvdkit_migrate.plan import Plan, plan
from hvdkit_migrate.report import write_diff, write_report

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
GOLDEN = Path(__file__).parent / "golden"
#: Scripts with something that only a person can do, and a word of what is said about each.
BY_HAND = {
    "ddp_groups": "new_group",
    "ddp_spawn": "torch.multiprocessing.spawn",
    "horovod_launchers": "hvdkit has no horovod.run",
    "horovod_sessions": "TensorFlow 1",
    "keras_generators": "a generator",
    "keras_schedules": "the schedule counts the steps",
    "torch_custom_sampler": "a custom sampler",
    "torch_iterable_dataset": "an IterableDataset cannot be sharded by index",
    "torch_lightning": "Lightning",
    "torch_nested_stop": "this exit depends on `bad > 3`",
    "torch_no_loader": "do not come from a DataLoader",
}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@functools.cache  # the same plan is looked at in several ways
def plan_of(script: Path) -> Plan:
    return plan(script.read_text(), script.name)


def comments_of(text: str) -> Counter[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Counter(one.string for one in tokens if one.type == tokenize.COMMENT)


@each_script
def test_report_and_diff_are_the_recorded_ones(script: Path) -> None:
    made = plan_of(script)
    told = write_report(made) + "\n" + write_diff(made)
    recorded = GOLDEN / f"migrate_{script.stem}.txt"
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        recorded.write_text(told)
    again = "HVDKIT_TEST_RECORD=1 pytest packages/migrate/tests/test_migrate.py"
    assert told == recorded.read_text(), f"if this is meant: {again}"


@each_script
def test_what_cannot_be_done_for_certain_is_told(script: Path) -> None:
    told = [finding.what for finding in plan_of(script).of("break")]
    if script.stem in BY_HAND:
        assert any(BY_HAND[script.stem] in one for one in told)
    else:
        assert told == []


@each_script
def test_a_migrated_script_compiles_and_is_left_alone(script: Path) -> None:
    after = plan_of(script).after
    ast.parse(after)
    again = plan(after, script.name)
    if script.stem in BY_HAND:
        return
    assert again.after == after
    assert again.of("change") == again.of("break") == []


@each_script
def test_comments_stay(script: Path) -> None:
    before = script.read_text()
    assert comments_of(before) <= comments_of(plan_of(script).after)


@each_script
def test_every_finding_says_what_and_how(script: Path) -> None:
    text = script.read_text()
    for finding in plan_of(script).findings:
        assert 1 <= finding.line <= len(text.splitlines())
        assert finding.what.endswith((".", "?"))
        assert bool(finding.edits) is (finding.kind == "change")
        assert bool(finding.write) is (finding.kind != "change")


@pytest.mark.parametrize("number", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_other_formatting_and_broken_scripts_do_not_confuse_it(number: int) -> None:
    @settings(max_examples=number)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        script = data.draw(st.sampled_from(SCRIPTS))
        lines = script.read_text().splitlines()
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(lines) - 1))
            if data.draw(st.booleans()):
                lines.insert(
                    at, data.draw(st.sampled_from(["", "# a comment", "    ", "\t# and a tab", "x = 1;", "pass"]))
                )
            else:
                del lines[at]
        if data.draw(st.booleans()):
            lines = [line.replace("    ", data.draw(st.sampled_from(["\t", "  "]))) for line in lines]
        newline = data.draw(st.sampled_from(["\n", "\r\n"]))
        text = newline.join(lines) + data.draw(st.sampled_from(["", newline, newline * 3]))
        try:
            made = plan(text, "train.py")
        except MigrateError as error:
            assert str(error).startswith("train.py:")
            return
        ast.parse(made.after)
        if newline == "\r\n":
            assert "\n" not in made.after.replace("\r\n", "")
        if not made.of("break"):
            assert plan(made.after, "train.py").after == made.after

    check()


SMALL = """\
import torch
from torch.utils.data import DataLoader

data = list(range(8))
loader = DataLoader(data, shuffle=True){comment}
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x in loader:
        model(x.float().view(-1, 1)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nprint 'Python 2'\n", "train.py:2: is not valid Python 3"),
        ("import torch\nif x:\ny = 1\n", "train.py:3: is not valid Python 3"),
        ("import numpy\n", "imports neither torch, keras, tensorflow nor horovod"),
        ("", "imports neither torch"),
        ("\x00", "train.py:"),
    ],
)
def test_what_is_no_script_is_an_error_with_its_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text)
    assert cli.main(["train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"# -*- coding: nothing -*-\n", b"import torch\nx = '\xff'\n"])
def test_what_is_no_text_is_an_error(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_bytes(data)
    assert cli.main([str(tmp_path / "train.py")]) == 2
    assert "train.py:1: cannot be decoded as text" in capsys.readouterr().err


def test_a_missing_script_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["/nowhere/train.py"]) == 2
    assert "/nowhere/train.py: cannot be read: No such file or directory. Check the path." in capsys.readouterr().err


def test_write_changes_the_file_in_one_step_and_keeps_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "train.py", tmp_path / "link.py"
    target.write_text(SMALL.format(comment=""))
    target.chmod(0o750)
    link.symlink_to(target)
    assert cli.main(["--check", str(target)]) == 1
    assert target.read_text() == SMALL.format(comment="")
    assert cli.main(["--write", str(link)]) == 0
    assert "hvd.init()" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o750
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]
    assert cli.main(["--check", str(target)]) == 0


def test_a_script_with_things_to_do_by_hand_is_written_only_partly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "train.py"
    before = SMALL.format(comment="").replace("shuffle=True", "sampler=mine")
    target.write_text(before)
    assert cli.main(["--check", str(target)]) == 1
    assert cli.main(["--write", str(target)]) == 2
    out, err = capsys.readouterr()
    assert f"{target}:5: a custom sampler" in out
    assert "not written: 1 thing to do by hand first" in err
    assert target.read_text() == before
    assert cli.main(["--write", "--partly", str(target)]) == 0
    assert "sampler=mine" in target.read_text()
    assert "hvd.init()" in target.read_text()


def test_a_wrong_option_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train.py", "--foo"])
    assert capsys.readouterr().err == ("hvdkit-migrate: unrecognized arguments: --foo. See hvdkit-migrate --help.\n")


def test_a_kind_that_is_given_is_not_asked_for_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.py"
    target.write_text("SIZE = 3\n")
    assert cli.main([str(target)]) == 2
    assert "name its kind with --from" in capsys.readouterr().err
    assert cli.main(["--from", "torch", str(target)]) == 0
    assert cli.main(["--from", "torch", "--partly", str(target)]) == 2
    assert "--partly is for --write" in capsys.readouterr().err


def test_a_comment_says_that_a_line_is_right() -> None:
    made = plan(SMALL.format(comment="  # hvdkit: ok").replace("shuffle=True", "sampler=mine"), "train.py")
    assert made.of("break") == []
    assert "sampler=mine" in made.after


def test_a_comment_takes_away_a_doubt_and_not_what_has_to_change() -> None:
    text = SMALL.format(comment="").replace("lr=0.1)", "lr=0.1)  # hvdkit: ok")
    text = text.replace(
        "        model(x.float().view(-1, 1)).sum().backward()\n        optimizer.step()", "        train(x)"
    )
    made = plan(text, "train.py")
    assert "DistributedOptimizer(optimizer, " in made.after, "that training is elsewhere was the doubt"
    assert not any("no backward pass" in one.what for one in made.of("break"))
    assert plan(text.replace("  # hvdkit: ok", ""), "train.py").of("break")


def test_a_comment_may_stand_behind_the_statement() -> None:
    text = SMALL.format(comment="").replace(
        "DataLoader(data, shuffle=True)", "DataLoader(\n    data,\n    sampler=mine,\n)  # hvdkit: ok"
    )
    assert plan(text, "train.py").of("break") == []


def test_json_is_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(SMALL.format(comment=""))
    (tmp_path / "b.py").write_text("import hvdkit.torch as hvd\n")
    assert cli.main(["--json", str(tmp_path / "a.py"), str(tmp_path / "b.py")]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["kind"], first["changed"], second["kind"], second["changed"]) == ("torch", True, "hvdkit", False)
    assert {"kind": "change", "line": 2, "what": "hvdkit.torch is imported as hvd.", "write": ""} in first["findings"]
    assert first["diff"].startswith("--- ")


def test_a_name_that_is_taken_is_left_alone() -> None:
    made = plan("hvd = 1\n" + SMALL.format(comment=""), "train.py")
    assert "import hvdkit.torch as hvdkit_ranks" in made.after
    assert "hvd = 1" in made.after
