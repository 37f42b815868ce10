"""The two command lines: their flags are frozen, and each works at its default."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit import __version__, cli
from hvdkit.config import read_config, read_settings
from hvdkit.launch import cli as hvdrun
from hvdkit.launch import horovod_flags
from hvdkit.launch.choose import Choice
from hvdkit.launch.elastic import describe_restarts, restart_instead
from hvdkit.launch.job import Job
from hvdkit.launch.mpi import Mpi

FLAGS = {
    "-h", "--help", "-n", "-np", "--num-proc", "-H", "--hosts", "--hostfile",
    "--hostfile-format", "--slots-per-host", "--output-filename", "--dry-run", "--verbose",
    "--version",
    "-v", "-hostfile", "--launcher", "--jsrun", "-p", "--ssh-port", "-i", "--ssh-identity-file",
    "--mpi-args", "--binding-args", "--tcp", "--config-file",
    "--network-interfaces", "--network-interface", "--no-forward-env", "--start-timeout", "--save-timeout",
    "--alias-horovod", "--wrap",
    "--host-discovery-script", "--blacklist-cooldown-range", "--blacklist-cooldown",
    "--reset-limit", "--elastic-timeout", "-ppn", "-c",
}  # fmt: skip


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_hvdruns_flags_are_frozen_but_for_the_settings() -> None:
    settings = {setting.flag for setting in read_settings({}) if setting.flag}
    horovodruns = {name for flag in horovod_flags.FLAGS for name in flag.names}
    assert flags_of(hvdrun.build_parser()) == FLAGS | settings | horovodruns


def test_a_settings_flag_sets_its_variable_and_no_other() -> None:
    parser = hvdrun.build_parser()
    assert parser.parse_args(["python"]).settings == {}
    for setting in read_settings({}):
        if setting.flag:
            switch = setting.default is False
            given = [setting.flag] if switch else [setting.flag, str(setting.default)]
            options = parser.parse_args([*given, "python", "x.py", setting.flag, "other"])
            assert options.settings == {setting.variable: "1" if switch else str(setting.default)}
            assert options.command == ["python", "x.py", setting.flag, "other"]


def test_every_flag_of_hvdrun_at_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = hvdrun.build_parser().parse_args(["-np", "3", "--", sys.executable, "-c", "pass"])
    job = hvdrun.plan_job(options, {"PATH": "/bin", "PYTHONUNBUFFERED": ""})
    assert (job.ranks, job.hosts, job.local, dict(job.variables)) == (3, (), True, {})
    assert job.command == (sys.executable, "-c", "pass")


def test_help_shows_the_defaults_of_the_settings_and_no_others() -> None:
    text = " ".join(hvdrun.build_parser().format_help().split())
    for setting in read_settings({}):
        if setting.flag:
            assert setting.variable + f" (default: {setting.default})" * (setting.default is not False) in text
    assert "default: None" not in text
    assert "default: False" not in text


BAD = {
    "there is no command": [],
    "two is not a whole number from 1 up": ["-np", "two", "true"],
    "unrecognized arguments: --bogus": ["--bogus", "true"],
    "0 is not a whole number from 1 up": ["-np", "0", "true"],
    "How many ranks": ["true"],
    "both say where to run": ["-np", "1", "-H", "localhost", "--hostfile", "x", "true"],
    "is more than the 2 slots": ["-np", "3", "-H", "localhost:2", "true"],
    "Unknown host: nowhere.invalid": ["-np", "1", "-H", "nowhere.invalid", "true"],
    "is not a host name": ["-np", "1", "-H", "-oProxyCommand=touch /tmp/x", "true"],
    "cannot be read: No such file": ["-np", "1", "--hostfile", "missing", "true"],
    "names no host": ["-np", "1", "--hostfile", "/dev/null", "true"],
    "no program 'no-such-program'": ["-np", "1", "no-such-program"],
    "no program './nothing'": ["-np", "1", "./nothing"],
    "is not executable": ["-np", "1", "./data.txt"],
    "is a folder": ["-np", "1", "./folder"],
    "is a script": ["-np", "1", "script.py"],
    "There is no script 'missing.py'": ["-np", "1", "python3", "-u", "-W", "error", "missing.py", "--lr", "1"],
    "HVDKIT_FUSION_BYTES='x'": ["-np", "1", "--fusion-bytes", "x", "true"],
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").touch()
    (tmp_path / "script.py").touch()
    (tmp_path / "folder").mkdir()
    try:
        code = hvdrun.main(BAD[sentence])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_a_wrong_variable_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDKIT_TRANSPORT", "pigeon")
    assert hvdrun.main(["-np", "1", "true"]) == 2
    assert "HVDKIT_TRANSPORT='pigeon'" in capfd.readouterr().err


@pytest.mark.parametrize("module", ["hvdkit", "hvdkit.launch"])
def test_both_commands_tell_their_version(module: str) -> None:
    answer = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.split()[1] == __version__


def test_help_of_hvdrun_loads_nothing_that_is_slow_to_load() -> None:
    script = "import sys; from hvdkit.launch import cli; cli.build_parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    slow = {"asyncio", "libcst", "mpi4py", "numpy", "rich", "torch", "tensorflow", "yaml"}
    assert not slow & set(done.stdout.split())


def test_doctor_shows_every_setting_and_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDKIT_TRANSPORT", "mpi")
    monkeypatch.setenv("HVDKIT_SHARED_DIRECTORY", "/dev/shm/" + "with/a/long/name/" * 8)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["doctor", "--settings", "--json"]) == 0
    settings = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert settings.keys() == {setting.name for setting in read_settings({})}
    assert (settings["transport"]["value"], settings["transport"]["origin"]) == ("mpi", "HVDKIT_TRANSPORT")
    assert cli.main(["doctor", "--settings"]) == 0
    table = capsys.readouterr().out
    assert all(setting.variable in table for setting in read_settings({}))


def test_doctor_says_which_variable_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDKIT_FUSION_BYTES", "many")
    assert cli.main(["doctor", "--settings"]) == 2
    assert "HVDKIT_FUSION_BYTES='many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("starter", "mpi", "who"),
    [
        ("mpirun", Mpi("open_mpi", "Open MPI", "4.1.6", "mpirun"), "this MPI (Open MPI 4.1.6) cannot go on"),
        ("mpirun", Mpi("mpich", "MPICH", "5.0", "mpirun"), "this MPI (MPICH 5.0) cannot go on"),
        ("srun", Mpi("open_mpi", "Open MPI", "5.0.11", "mpirun"), "ranks that srun has started cannot go on"),
        ("srun", None, "ranks that srun has started cannot go on"),
    ],
)
def test_where_no_rank_outlives_another_it_is_said_that_hvdrun_starts_again(
    starter: str, mpi: Mpi | None, who: str
) -> None:
    job = Job(command=("true",), ranks=2, elastic=True, variables={"HVDKIT_ELASTIC": "1"})
    why = describe_restarts(job, Choice(starter=starter, reason="", mpi=mpi))
    assert why.startswith(who) and "hvdrun starts the job again from its last checkpoint" in why
    instead = restart_instead(job, why)
    assert not instead.elastic and instead.notes == (why,)
    assert read_config(instead.variables).elastic_restarts
    ulfm = Choice(starter="mpirun", reason="", mpi=Mpi("open_mpi", "Open MPI", "5.0.11", "mpirun"))
    assert describe_restarts(job, ulfm) == ""
