"""hvdrun --wrap with and without the package hvdkit-wrap, and the settings of the package."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from hvdkit import entry_points, startup
from hvdkit.config import Config, read_package_config, read_settings
from hvdkit.errors import ConfigError
from hvdkit.launch.cli import hvdrun
from hvdkit.setting import find_misspelt
from hvdkit_wrap import begin
from hvdkit_wrap.settings import WrapSettings

INSTALL = "Run, in a clone of hvdkit: pip install -c constraints.txt ./packages/wrap\n"


def test_hvdrun_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(startup, "find_entry_points", lambda group: {})
    assert hvdrun.main(["-np", "3", "--wrap", "true"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("hvdrun: --wrap is in the package hvdkit-wrap, which is not installed in this Python, ")
    assert err.endswith(INSTALL)


def test_an_option_of_wrap_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry_points, "find_entry_points", lambda group: {})
    for word in ("--wrap-batch", "--wrap-batch=split", "--wrap-no-such"):
        with pytest.raises(SystemExit) as end:
            hvdrun.main(["-np", "3", word, "split", "true"])
        assert end.value.code == 2
        name = word.partition("=")[0]
        wanted = f"hvdrun: {name} is in the package hvdkit-wrap, which is not installed. {INSTALL}"
        assert capfd.readouterr() == ("", wanted)
    assert hvdrun.main(["-np", "3", "-x", "HVDKIT_WRAP_BATCH=split", "true"]) == 2
    assert "-x HVDKIT_WRAP_BATCH: hvdkit has no setting of this name." in capfd.readouterr().err


def test_the_settings_have_the_variables_and_options_of_wrap() -> None:
    settings = {each.variable: (each.flag, each.default) for each in read_settings({}, WrapSettings)}
    assert settings == {
        "HVDKIT_WRAP_BATCH": ("--wrap-batch", "split"),
        "HVDKIT_WRAP_RATE": ("--wrap-rate", "linear"),
        "HVDKIT_WRAP_WARMUP": ("--wrap-warmup", 1.0),
        "HVDKIT_WRAP_BATCH_NORM": ("--wrap-batch-norm", "rank"),
        "HVDKIT_WRAP_TABLE": ("", True),
        "HVDKIT_WRAP_SEED": ("", 0),
    }
    config = read_package_config(WrapSettings, {"HVDKIT_WRAP_WARMUP": "2.5", "HVDKIT_WRAP_TABLE": "0"})
    assert config == WrapSettings(warmup=2.5, table=False)
    assert find_misspelt(settings, [field.name for field in fields(Config)]) == {}, "init() would warn of them"


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_warmup_is_finite_and_not_negative(wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"wrap_warmup is {wrong}; it must be 0 or more"):
        WrapSettings(warmup=wrong)


def test_a_misspelt_variable_of_wrap_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hvdkit"):
        begin._warn_of_misspelt({"HVDKIT_WRAP_BACH": "split", "HVDKIT_WRAP_SEED": "1", "HVDKIT_TRANSPROT": "mpi"})
    assert [record.getMessage() for record in caplog.records] == [
        "HVDKIT_WRAP_BACH is not a setting of hvdkit-wrap and is ignored. Did you mean HVDKIT_WRAP_BATCH?"
    ]
