"""hvdkit examples: lists the gallery and writes a script, without overwriting one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdkit import cli

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_script_of_the_gallery_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples", "--json"]) == 0
    listed = {each["name"]: each["summary"] for each in json.loads(capsys.readouterr().out)}
    assert set(listed) == {script.stem for script in EXAMPLES.glob("*.py")}
    assert all(listed.values())


def test_an_example_is_written_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["examples", "pytorch_digits.py"]) == 0
    written = tmp_path / "pytorch_digits.py"
    assert written.read_text() == (EXAMPLES / "pytorch_digits.py").read_text()
    written.write_text("mine")
    assert cli.main(["examples", "pytorch_digits"]) == 2
    assert written.read_text() == "mine" and "not overwritten" in capsys.readouterr().err


def test_a_name_that_is_no_example_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples", "pytorch_digit"]) == 2
    assert "Did you mean pytorch_digits?" in capsys.readouterr().err


def test_a_wheels_own_examples_are_those_of_the_package_and_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "site-packages" / "hvdkit"
    (package / "examples").mkdir(parents=True)
    (package.parent / "examples").mkdir()
    (package.parent / "examples" / "of_another_package.py").write_text('"""Another package."""')
    monkeypatch.setattr("hvdkit.__file__", str(package / "__init__.py"))
    assert cli.main(["examples"]) == 2
    assert f"no examples are installed: {package / 'examples'} has no *.py" in capsys.readouterr().err
    (package / "examples" / "mine.py").write_text('"""Mine."""\n')
    assert cli.main(["examples", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed == {"name": "mine", "summary": "Mine", "path": str(package / "examples" / "mine.py")}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("ray_digits", "python ray_digits.py --workers 2"),  # without hvdrun
        ("pytorch_uneven", "hvdrun -np 3 python pytorch_uneven.py --slow-ms 2"),
        ("pytorch_zero", "hvdrun -np 2 pytorch_zero.py"),
    ],
)
def test_it_says_how_to_start_the_script_that_it_has_written(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["examples", name]) == 0
    assert capsys.readouterr().out == f"wrote {name}.py. Start it: {command}\n"
