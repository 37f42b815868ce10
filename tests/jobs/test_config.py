from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import hvdkit
from hvdkit.config import Config, read_config, read_settings
from hvdkit.errors import ConfigError
from hvdkit.setting import MIB, find_misspelt, parse_bool, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("4194304", 4 * MIB), ("4096k", 4 * MIB), ("4m", 4 * MIB), ("4MiB", 4 * MIB), ("0.5G", 512 * MIB)],
)
def test_bytes_are_read_with_binary_multiples(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("Yes", True), (" on ", True), ("0", False), ("", False)])
def test_switches_are_read_in_words_and_digits(text: str, expected: bool) -> None:
    assert parse_bool(text) is expected


def test_a_switch_that_is_neither_is_an_error() -> None:
    with pytest.raises(ValueError, match="use 1 or 0"):
        parse_bool("maybe")


def test_nothing_set_means_the_defaults() -> None:
    assert read_config({}) == Config()
    assert {setting.origin for setting in read_settings({})} == {"default"}


def test_an_argument_beats_a_variable_beats_horovods_beats_the_default() -> None:
    environ = {"HOROVOD_LOG_LEVEL": "error"}
    assert read_config(environ).log_level == "error"
    environ["HVDKIT_LOG_LEVEL"] = "info"
    assert read_config(environ).log_level == "info"
    assert read_config(environ, log_level="debug").log_level == "debug"


def test_a_setting_tells_where_it_comes_from() -> None:
    found = {setting.name: setting for setting in read_settings({"HOROVOD_LOG_LEVEL": "DEBUG"})}
    assert (found["log_level"].value, found["log_level"].origin) == ("debug", "HOROVOD_LOG_LEVEL")


def test_horovods_switch_turns_the_stall_check_off_unless_hvdkit_is_told_otherwise() -> None:
    environ = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    assert (read_config(environ).stall_check_s, read_config(environ).stall_shutdown_s) == (0.0, 0.0)
    origins = {setting.name: setting.origin for setting in read_settings(environ)}
    assert origins["stall_check_s"] == "HOROVOD_STALL_CHECK_DISABLE"
    environ["HVDKIT_STALL_CHECK_S"] = "30"
    assert read_config(environ).stall_check_s == 30.0
    environ["HOROVOD_STALL_CHECK_DISABLE"] = "0"
    assert read_config(environ).stall_shutdown_s == 9.0
    with pytest.raises(ConfigError, match="HOROVOD_STALL_CHECK_DISABLE='maybe': use 1 or 0"):
        read_config({"HOROVOD_STALL_CHECK_DISABLE": "maybe"})


def test_an_empty_variable_counts_as_unset() -> None:
    assert read_config({"HVDKIT_TRANSPORT": ""}).transport == "auto"


def test_all_wrong_variables_are_named_together() -> None:
    with pytest.raises(ConfigError) as error:
        read_settings({"HVDKIT_TRANSPORT": "pigeon", "HVDKIT_FUSION_BYTES": "many", "HVDKIT_PROGRESS": "inline"})
    message = str(error.value)
    assert "HVDKIT_TRANSPORT='pigeon': use one of auto, single, mpi" in message
    assert "HVDKIT_FUSION_BYTES='many'" in message
    assert "HVDKIT_PROGRESS" not in message


NUMBERS = [
    setting.name
    for setting in read_settings({})
    if isinstance(setting.default, int | float) and not isinstance(setting.default, bool)
]


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_must_be_finite_and_not_negative(name: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {wrong}; it must be"):
        Config(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"buckets_in_flight": 0},
        {"chunk_bytes": 4095},
        {"autotune_steps": 9},
        {"straggler_percent": 101.0},
        {"min_np": 3, "max_np": 2},
        {"engine": "horovod", "transport": "mpi"},
        {"engine": "horovod", "device_transport": "nccl"},
        {"engine": "horovod", "device_sums": "float32"},
    ],
)
def test_a_value_out_of_range_or_in_contradiction_is_an_error(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(reversed(wrong))}[ =]"):
        Config(**wrong)  # type: ignore[arg-type]


def test_an_algorithm_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"HVDKIT_ALGORITHM.*auto, library, pieces, doubling, halving"):
        read_config({"HVDKIT_ALGORITHM": "ring"})


def test_settings_cannot_be_changed_once_read() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().transport = "mpi"  # type: ignore[misc]


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        read_config({}, colour="red")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"transport": "mpy"}, "transport is 'mpy'; use one of auto, single, mpi"),
        ({"fusion_bytes": "4m"}, "fusion_bytes is '4m'; it must be a whole number"),
        ({"elastic": "yes"}, "elastic is 'yes'; it must be True or False"),
        ({"stall_check_s": "60"}, "stall_check_s is '60'; it must be a number"),
        ({"buckets_in_flight": 2.5}, "buckets_in_flight is 2.5; it must be a whole number"),
        ({"elastic": 1.0}, "elastic is 1.0; it must be True or False"),
        ({"timeline": 3}, "timeline is 3; it must be a string"),
    ],
)
def test_an_argument_that_its_variable_could_not_say_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({}, **arguments)


def test_an_argument_of_none_is_as_no_argument() -> None:
    environ = {"HVDKIT_TIMELINE": "trace.json"}
    assert read_config(environ, timeline=None, stall_check_s=None) == read_config(environ)


def test_a_whole_number_may_be_a_float() -> None:
    config = read_config({}, fusion_bytes=64e6)
    assert config.fusion_bytes == 64_000_000 and type(config.fusion_bytes) is int


def test_a_misspelt_argument_is_answered_with_the_nearest_setting() -> None:
    with pytest.raises(TypeError, match="there is no setting 'transprot'; did you mean transport"):
        read_config({}, transprot="mpi")


def test_variables_that_resemble_a_setting_are_found_and_those_of_others_are_not() -> None:
    settings = [item.name for item in fields(Config)]
    wrong = {
        "HVDKIT_TRANSPROT": "HVDKIT_TRANSPORT",
        "HVDKIT_FUSION_THRESHOLD": "HVDKIT_FUSION_BYTES",
        "HVDKIT_STALL_CHECK": "HVDKIT_STALL_CHECK_S",
    }
    own = re.findall(
        r"\bHVDKIT_[A-Z_]*[A-Z]\b", "".join(path.read_text() for path in Path(hvdkit.__file__).parent.rglob("*.py"))
    )
    right = {*own, "HVDKIT_ROOT", "HVDKIT_HOME", "HVDKIT_DIR", "HVDKIT_VERSION", "TRANSPROT"}
    assert "HVDKIT_CONTROL" in right and find_misspelt([*wrong, *right], settings) == wrong


def test_init_warns_of_a_misspelt_variable_and_of_settings_that_come_too_late() -> None:
    code = "from hvdkit.engine import runtime as hvd\nhvd.init()\nhvd.init(fusion_bytes=4 * 2**20)\n"
    more = "hvd.init(fusion_bytes=64e6)"
    environ = {**os.environ, "HVDKIT_TRANSPROT": "mpi", "HVDKIT_HOME": "/opt/hvdkit"}
    ran = subprocess.run([sys.executable, "-c", code + more], env=environ, capture_output=True, text=True, timeout=60)
    misspelt, late = ran.stderr.splitlines()
    assert "HVDKIT_TRANSPROT is not a setting of hvdkit" in misspelt and "Did you mean HVDKIT_TRANSPORT?" in misspelt
    assert "init(fusion_bytes=64000000) is ignored: hvdkit is already initialized, with fusion_bytes=4194304" in late


@pytest.mark.parametrize(
    ("name", "label", "settings", "named"),
    [
        ("tensorflow", "tensorflow 2.21", {"device_transport": "torch"}, "device_transport=torch"),
        ("", "keras 3.15 on jax", {"device_sums": "float32"}, "device_sums=float32"),
        ("tensorflow", "tensorflow 2.21", {"device_sums": "float32", "device_transport": "host"}, ""),
        ("tensorflow", "tensorflow 2.21", {"device_transport": "nccl"}, ""),
        ("torch", "torch 2.13", {"device_transport": "torch", "device_sums": "float32"}, ""),
    ],
)
def test_init_warns_of_settings_for_pytorch_in_a_job_of_another_framework(
    name: str, label: str, settings: dict[str, str], named: str
) -> None:
    code = (
        "from hvdkit.engine.basics import Framework\n"
        "none = lambda: None\n"
        f"Framework({name!r}, {label!r}, none, lambda: 1, cuda=False, rocm=False, nccl=none).init(**{settings!r})\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    expected = [f"{named} is for tensors of PyTorch, and this is {label}"] if named else []
    lines = ran.stderr.splitlines()
    assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True))


def test_every_setting_has_a_variable_and_a_meaning_and_flags_are_distinct() -> None:
    settings = read_settings({})
    assert [setting.name for setting in settings] == [field.name for field in fields(Config)]
    for setting in settings:
        assert setting.variable == f"HVDKIT_{setting.name.upper()}"
        assert setting.help
    flags = [setting.flag for setting in settings if setting.flag]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("other", [{"engine": "horovod"}, {"transport": "gloo"}, {"transport": "single"}])
def test_elastic_worlds_are_refused_where_none_can_change(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="elastic needs the native engine over MPI"):
        read_config({}, elastic=True, **other)
    assert read_config({}, elastic=True, elastic_restarts=True, **other).elastic_restarts
