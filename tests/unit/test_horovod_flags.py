"""Every flag of horovodrun 0.28.1: accepted with its meaning, or without effect and with a sentence that says so."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_job import plan_job
from refused import refused

from hvdkit.errors import LaunchError
from hvdkit.launch.cli import hvdrun
from hvdkit.launch.cli.horovod import write_flags
from hvdkit.launch.cli.options import parse_arguments

# Flag -> an argument it may have, or "" if it has none. As its parser has them (horovod/runner/launch.py).
HOROVODRUN = {
    "-h": "", "--help": "", "-v": "", "--version": "", "-np": "2", "--num-proc": "2", "-cb": "", "--check-build": "",
    "--disable-cache": "", "--start-timeout": "30", "--network-interfaces": "eth0,eth1", "--network-interface": "eth0",
    "--output-filename": "logs", "--verbose": "", "--config-file": "FILE", "-p": "2222", "--ssh-port": "2222",
    "-i": "KEY", "--ssh-identity-file": "KEY", "--fusion-threshold-mb": "32", "--cycle-time-ms": "3.5",
    "--cache-capacity": "1024", "--hierarchical-allreduce": "", "--no-hierarchical-allreduce": "",
    "--hierarchical-allgather": "", "--no-hierarchical-allgather": "", "--torus-allreduce": "",
    "--no-torus-allreduce": "", "--autotune": "", "--no-autotune": "", "--autotune-log-file": "log.csv",
    "--autotune-warmup-samples": "3", "--autotune-steps-per-sample": "10", "--autotune-bayes-opt-max-samples": "20",
    "--autotune-gaussian-process-noise": "0.8", "--min-np": "1", "--min-num-proc": "1", "--max-np": "4",
    "--max-num-proc": "4", "--slots-per-host": "2", "--elastic-timeout": "600", "--reset-limit": "3",
    "--blacklist-cooldown-range": "60 300", "--timeline-filename": "trace.json", "--timeline-mark-cycles": "",
    "--no-timeline-mark-cycles": "", "--no-stall-check": "", "--stall-check": "",
    "--stall-check-warning-time-seconds": "30", "--stall-check-shutdown-time-seconds": "90",
    "--mpi-threads-disable": "", "--no-mpi-threads-disable": "", "--mpi-args": "--report-bindings", "--tcp": "",
    "--binding-args": "--map-by socket", "--num-nccl-streams": "1", "--thread-affinity": "0",
    "--gloo-timeout-seconds": "60", "--log-level": "INFO", "--log-with-timestamp": "", "--log-without-timestamp": "",
    "-prefix-timestamp": "", "--prefix-output-with-timestamp": "", "--log-hide-timestamp": "",
    "--no-log-hide-timestamp": "", "-H": "localhost:2", "--hosts": "localhost:2", "-hostfile": "HOSTS",
    "--hostfile": "HOSTS", "--host-discovery-script": "./hosts.sh", "--gloo": "", "--mpi": "", "--jsrun": "",
}  # fmt: skip

# What an accepted flag sets. What is not here sets nothing: it asks for what is so anyway, or is hvdrun's own.
SETS = {
    "--fusion-threshold-mb": {"HVDKIT_FUSION_BYTES": str(32 * 1024 * 1024)},
    "--hierarchical-allreduce": {"HVDKIT_TRANSPORT": "hierarchical"},
    "--no-hierarchical-allreduce": {"HVDKIT_TRANSPORT": "mpi"},
    "--no-stall-check": {"HVDKIT_STALL_CHECK_S": "0", "HVDKIT_STALL_SHUTDOWN_S": "0"},
    "--stall-check-warning-time-seconds": {"HVDKIT_STALL_CHECK_S": "30"},
    "--stall-check-shutdown-time-seconds": {"HVDKIT_STALL_SHUTDOWN_S": "90"},
    "--timeline-filename": {"HVDKIT_TIMELINE": "trace.json"},
    "--log-level": {"HVDKIT_LOG_LEVEL": "INFO"},
    "--autotune": {"HVDKIT_AUTOTUNE": "1"},
    "--no-autotune": {"HVDKIT_AUTOTUNE": "0"},
    "--autotune-log-file": {"HVDKIT_AUTOTUNE_LOG": "log.csv"},
    "--gloo": {"HVDKIT_TRANSPORT": "gloo"},
    "--tcp": {"NCCL_IB_DISABLE": "1"},
    "--min-np": {"HVDKIT_ELASTIC": "1", "HVDKIT_MIN_NP": "1", "HVDKIT_MAX_NP": "2"},
    "--min-num-proc": {"HVDKIT_ELASTIC": "1", "HVDKIT_MIN_NP": "1", "HVDKIT_MAX_NP": "2"},
    "--max-np": {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": "4"},
    "--max-num-proc": {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": "4"},
    "--elastic-timeout": {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": "2"},
    "--reset-limit": {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": "2"},
    "--blacklist-cooldown-range": {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": "2"},
    "--host-discovery-script": {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": "2"},
}
REFUSED = {"-cb", "--check-build"}
WITHOUT_EFFECT = {
    *("--cycle-time-ms", "--timeline-mark-cycles", "--cache-capacity", "--hierarchical-allgather", "--torus-allreduce"),
    *("--autotune-warmup-samples", "--autotune-steps-per-sample"),
    *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    *("--mpi-threads-disable", "--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds"),
    *("--log-with-timestamp", "--no-log-hide-timestamp", "-prefix-timestamp", "--prefix-output-with-timestamp"),
}
ENDS = {"-h", "--help", "-v", "--version"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "KEY").touch()
    (tmp_path / "FILE").write_text("{}")
    (tmp_path / "HOSTS").write_text("localhost slots=2\n")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts.sh").chmod(0o700)
    return tmp_path


def arguments(flag: str, joined: bool = False) -> list[str]:
    value = HOROVODRUN[flag]
    rest = ["-np", "2", "true"] if flag not in ("-np", "--num-proc") else ["true"]
    if joined and value:
        return [f"{flag}={value}", *rest]
    return [flag, *([value] if flag in ("--mpi-args", "--binding-args") else value.split()), *rest]


@pytest.mark.parametrize("flag", [flag for flag in HOROVODRUN if flag not in REFUSED | ENDS])
def test_an_accepted_flag_means_what_it_means_to_horovodrun(flag: str, files: Path) -> None:
    if flag == "--config-file":
        pytest.importorskip("yaml")
    joined = flag in ("--mpi-args", "--binding-args")  # they begin with a dash
    options = parse_arguments(arguments(flag, joined))
    job = plan_job(options, {"PATH": "/usr/bin:/bin", "HOME": "/root", "PYTHONUNBUFFERED": ""})
    assert job.command == ("true",)
    assert job.ranks == 2
    expected = dict(SETS.get(flag, {}))
    if flag == "--output-filename":
        expected["HVDKIT_OUTPUT_DIRECTORY"] = str(files / "logs")
    assert job.variables == expected
    lines = [note for note in job.notes if " has no effect. " in note]
    assert len(lines) == (flag in WITHOUT_EFFECT)
    assert all(line.startswith(f"{flag} has no effect. ") for line in lines)
    assert all(any(word in line for word in ("no setting", "--", "Use ", "use: ")) for line in lines)


def test_variables_of_horovod_without_effect_are_named_unless_its_core_reads_them(files: Path) -> None:
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/root",
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_FUSION_THRESHOLD": "67108864",
    }
    environ |= {"HOROVOD_TORUS_ALLREDUCE": "0", "HOROVOD_TIMELINE": "trace.json"}
    for engine, named in (("native", ["HOROVOD_CYCLE_TIME=3.5", "HOROVOD_FUSION_THRESHOLD=67108864"]), ("horovod", [])):
        job = plan_job(parse_arguments(["--engine", engine, "-np", "2", "true"]), environ)
        assert [note.partition(" has no effect. ")[0] for note in job.notes if "no effect" in note] == named


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_refused_flag_is_one_sentence_that_names_what_to_do(
    flag: str, joined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments(arguments(flag, joined and flag.startswith("--")))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith(f"hvdrun: {flag} is an option of horovodrun that hvdrun does not have. ")
    said = error.partition("does not have. ")[2]
    assert any(word in said for word in ("Leave it out", "Use ", "use ", "--", "nearest"))


@pytest.mark.parametrize("flag", sorted(ENDS))
def test_flags_that_only_tell_something_end_well(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments([flag])
    assert end.value.code == 0
    assert "hvdrun" in capsys.readouterr().out


def test_the_table_is_horovodruns() -> None:
    """Where Horovod is installed, its own parser is asked."""
    try:
        launch = importlib.import_module("horovod.runner.launch")
    except ImportError:
        return  # the table above is what it was found to be
    names: set[str] = set()

    def take(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        names.update(parser._option_string_actions)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", take)
        with pytest.raises(KeyboardInterrupt):
            launch.parse_args()
    assert names == set(HOROVODRUN)


def test_a_number_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("x", "-1", "1.5"):
        with pytest.raises(SystemExit):
            parse_arguments([f"--fusion-threshold-mb={value}", "true"])
        assert "is not a whole number of at least 0" in capsys.readouterr().err


BAD = {
    "identity-file-missing": ["-i", "missing"],
    "identity-file-name": ["-i", "my key"],
    "option-quotes": ["--mpi-args", "'open"],
}


@pytest.mark.parametrize("code", BAD)
def test_what_cannot_be_used_is_said(code: str, files: Path) -> None:
    (files / "my key").touch()
    options = parse_arguments([*BAD[code], "-np", "1", "true"])
    with refused(code, names=[BAD[code][1]]):
        plan_job(options, {"PATH": "/usr/bin:/bin"})


CONFIG = """
controller: mpi
params:
  fusion_threshold_mb: 8
  hierarchical_allreduce: true
timeline:
  filename: "a b.json"
stall_check:
  enabled: true
  warning_time_seconds: 20
logging:
  level: INFO
"""


def test_a_configuration_is_read_and_what_is_typed_goes_before(files: Path) -> None:
    pytest.importorskip("yaml")
    (files / "config.yaml").write_text(CONFIG)
    options = parse_arguments(["--config-file", "config.yaml", "--fusion-bytes", "1m", "-np", "1", "true"])
    assert options.settings == {
        "HVDKIT_FUSION_BYTES": "1m",
        "HVDKIT_TRANSPORT": "hierarchical",
        "HVDKIT_TIMELINE": "a b.json",
        "HVDKIT_STALL_CHECK_S": "20",
        "HVDKIT_LOG_LEVEL": "INFO",
    }
    assert (options.command, options.np) == (("true",), 1)


def test_what_a_configuration_cannot_have_is_said_with_its_file(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    (files / "config.yaml").write_text("params: {torus_allreduce: true, cycle_time_ms: 3.5, cache_capacity: 1024}")
    job = plan_job(parse_arguments(["--config-file", "config.yaml", "-np", "1", "true"]), {"PATH": "/usr/bin:/bin"})
    named = [note.partition(" has no effect. ")[0] for note in job.notes if "no effect" in note]
    assert sorted(named) == ["--cache-capacity", "--cycle-time-ms", "--torus-allreduce"]
    for text, why in (
        ("a: [", "cannot be read"),
        ("- 1", "has no sections"),
        ("speed: 9", "'speed' is not"),
    ):
        (files / "config.yaml").write_text(text)
        assert hvdrun.main(["--config-file", "config.yaml", "-np", "1", "true"]) == 2
        error = capsys.readouterr().err
        assert why in error
        assert len(error.splitlines()) == 1
    assert hvdrun.main(["--config-file", "none.yaml", "-np", "1", "true"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_all_problems_of_a_configuration_are_told_together() -> None:
    content = {"controller": "pigeon", "params": {"speed": 9, "torus_allreduce": 3, "cycle_time_ms": [1]}, "x": {}}
    names = ["config.yaml", "controller: 'pigeon'", "params.speed", "torus_allreduce", "cycle_time_ms", "'x'"]
    with refused("config-file-entries", names=names):
        write_flags(content, "config.yaml")


_KEYS = st.sampled_from(["controller", "params", "logging", "timeline", "enabled", "fusion_threshold_mb", "filename"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(_VALUES)
def test_no_configuration_is_more_than_an_error(content: Any) -> None:
    with contextlib.suppress(LaunchError):
        assert all(flag.startswith("--") for flag in write_flags(content, "config.yaml"))
