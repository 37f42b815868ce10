"""Settings of a package: hvdrun has their options and checks their values, and ranks get the variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_entry_points import plant_package
from planned_job import plan_job
from refused import refused

from hvdkit.config import read_package_config
from hvdkit.errors import ConfigError, HvdkitError
from hvdkit.launch.cli.options import build_parser, parse_arguments
from hvdkit.package_settings import ENTRY_POINTS, find_package_settings, read_all_settings

CODE = """
from dataclasses import dataclass
from typing import ClassVar
from hvdkit.setting import Settings, choice, setting

@dataclass(frozen=True, kw_only=True)
class Planted(Settings):
    prefix: ClassVar[str] = "planted"
    colour: str = setting("red", choice("red", "blue"), "the colour", flag="--planted-colour")
    depth: int = setting(3, int, "the depth", flag="--planted-depth", least=1)
    hidden: int = setting(0, int, "no option")
"""
ENVIRON = {"PATH": "/bin", "HOME": "/root"}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_package(tmp_path, "planted_settings", CODE, ENTRY_POINTS, {"planted": "planted_settings:Planted"})
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_adds_options_whose_variables_ranks_get(planted: None) -> None:
    options = parse_arguments(["-np", "3", "--planted-colour", "BLUE", "--planted-depth=7", "true"])
    assert options.settings == {"HVDKIT_PLANTED_COLOUR": "BLUE", "HVDKIT_PLANTED_DEPTH": "7"}
    variables = plan_job(options, ENVIRON).variables
    kind = find_package_settings()["planted"]
    assert vars(read_package_config(kind, variables)) == {"colour": "blue", "depth": 7, "hidden": 0}
    sent = plan_job(parse_arguments(["-np", "3", "-x", "HVDKIT_PLANTED_HIDDEN=2", "true"]), ENVIRON).variables
    assert sent["HVDKIT_PLANTED_HIDDEN"] == "2"


def test_the_long_help_has_a_group_of_them_and_the_list_of_settings_too(planted: None) -> None:
    text = build_parser(everything=True).format_help()
    group = text.partition("settings of --planted:")[2].partition("\n\n")[0]
    assert "--planted-colour {red,blue}" in group and "HVDKIT_PLANTED_DEPTH" in group
    assert "--planted" not in build_parser().format_help()
    listed = {each.variable: each.value for each in read_all_settings({"HVDKIT_PLANTED_DEPTH": "5"})}
    assert (listed["HVDKIT_PLANTED_DEPTH"], listed["HVDKIT_PLANTED_COLOUR"]) == (5, "red")
    assert listed["HVDKIT_TRANSPORT"] == "auto"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HVDKIT_PLANTED_COLOUR": "green"}, "HVDKIT_PLANTED_COLOUR='green': use one of red, blue"),
        ({"HVDKIT_PLANTED_DEPTH": "0"}, "planted_depth is 0; it must be 1 or more"),
    ],
)
def test_a_wrong_variable_of_a_package_is_refused_before_anything_starts(
    planted: None, environ: dict[str, str], message: str
) -> None:
    options = parse_arguments(["-np", "3", "true"])
    with pytest.raises(ConfigError, match=message):
        plan_job(options, {**ENVIRON, **environ})


def test_without_the_package_its_option_and_its_variables_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["-np", "3", "--planted-colour", "blue", "true"])
    assert "unknown option --planted-colour" in capsys.readouterr().err
    with refused("setting-unknown", names=["-x HVDKIT_PLANTED_COLOUR"]):
        plan_job(parse_arguments(["-np", "3", "-x", "HVDKIT_PLANTED_COLOUR=blue", "true"]), ENVIRON)
    assert plan_job(parse_arguments(["-np", "3", "true"]), {**ENVIRON, "HVDKIT_PLANTED_DEPTH": "0"}).ranks == 3


@pytest.mark.parametrize(
    ("number", "changed", "message"),
    [
        (1, ("import dataclass", "import no_such_thing"), "ImportError: cannot import name"),
        (2, ('= "planted"', '= "other"'), "with the prefix planted"),
        (3, ('"--planted-depth"', '"--depth"'), "options that begin with --planted-"),
        (4, ("Planted(Settings)", "Planted"), "is not a dataclass of settings"),
        (
            5,
            ("from typing import ClassVar", "raise OSError('no disk\\n\\n  of this name')"),
            r"loaded: OSError: no disk of this name \(entry point planted of hvdkit.settings\)",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, changed: tuple[str, str], message: str
) -> None:
    module = f"planted_{number}"
    plant_package(tmp_path, module, CODE.replace(*changed), ENTRY_POINTS, {"planted": f"{module}:Planted"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HvdkitError, match=message) as error:
        parse_arguments(["-np", "3", "true"])
    assert str(error.value).startswith(f"the package {module} cannot be loaded: ")
    assert str(error.value).endswith("Update or remove this package.")
