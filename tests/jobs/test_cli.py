"""The two command lines: their flags are frozen, and each works at its default."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from planned_job import plan_job

from hvdkit import __version__, cli
from hvdkit.config import read_config
from hvdkit.launch.cli import hvdrun
from hvdkit.launch.cli.options import build_parser, parse_arguments
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.horovod_options import FLAGS as FLAGS_OF_HOROVOD
from hvdkit.launch.plan.horovod_options import OTHERS
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.plan.selected_launcher import SelectedLauncher
from hvdkit.launch.plan_elastic import describe_restarts
from hvdkit.launch.plan_job import with_elasticity
from hvdkit.package_settings import read_all_settings

FLAGS = {
    "-h", "--help", "--help-all", "--print-completion", "-n", "-np", "--np", "--num-proc", "-H", "--hosts",
    "--hostfile",
    "-m", "--module", "-x", "--env", "-q", "--quiet", "--no-prefix", "--metrics-port", "--tag-output", "--show-ranks",
    "--hostfile-format", "--slots-per-host", "--output-filename", "--dry-run", "--verbose",
    "--version",
    "-v", "-hostfile", "--launcher", "--jsrun", "-p", "--ssh-port", "-i", "--ssh-identity-file",
    "--mpi-args", "--binding-args", "--tcp", "--config-file",
    "--network-interfaces", "--network-interface", "--no-forward-env", "--start-timeout", "--save-timeout",
    "--alias-horovod", "--wrap", "--mpi-backend",
    "--host-discovery-script", "--blacklist-cooldown-range", "--blacklist-cooldown",
    "--reset-limit", "--elastic-timeout",
}  # fmt: skip


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


def test_hvdruns_flags_are_frozen_but_for_the_settings() -> None:
    settings = {setting.flag for setting in read_all_settings({}) if setting.flag}
    horovodruns = {name for flag in (*FLAGS_OF_HOROVOD, *OTHERS) for name in flag.names}
    assert flags_of(build_parser()) == FLAGS | settings | horovodruns


def test_a_settings_flag_sets_its_variable_and_no_other() -> None:
    assert parse_arguments(["python"]).settings == {}
    for setting in read_all_settings({}):
        if setting.flag:
            switch = setting.default is False
            given = [setting.flag] if switch else [setting.flag, str(setting.default)]
            options = parse_arguments([*given, "python", "x.py", setting.flag, "other"])
            assert options.settings == {setting.variable: "1" if switch else str(setting.default)}
            assert options.command == ("python", "x.py", setting.flag, "other")


def test_every_flag_of_hvdrun_at_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_arguments(["-np", "3", "--", sys.executable, "-c", "pass"])
    job = plan_job(options, {"PATH": "/bin", "HOME": "/root", "PYTHONUNBUFFERED": ""})
    assert (job.ranks, job.hosts, job.local, dict(job.variables)) == (3, (), True, {})
    assert job.command == (sys.executable, "-c", "pass")


def test_the_short_help_fits_on_a_screen_and_the_long_one_has_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, everything = build_parser().format_help(), build_parser(everything=True).format_help()
    assert len(short.splitlines()) <= 60
    assert "hvdkit docs clusters/hvdrun" in short and "hvdkit docs clusters/hvdrun" in everything
    words = set(everything.replace(",", " ").split())
    hidden = {"-hostfile", "--num-proc", "--np", "--network-interface", "--blacklist-cooldown"}
    refused = {name for flag in (*FLAGS_OF_HOROVOD, *OTHERS) if flag.refused for name in flag.names}
    assert flags_of(build_parser()) - words == hidden | refused
    assert not hidden & words


def test_the_long_help_groups_the_settings_by_what_they_are_for() -> None:
    groups = {
        group.title: {name for action in group._group_actions for name in action.option_strings}
        for group in build_parser(everything=True)._action_groups
    }
    assert {"--fusion-bytes", "--autotune", "--share-gpus"} <= groups["tuning"]
    assert {"--wrap-batch", "--wrap-rate"} <= groups["settings of --wrap"]
    assert not (groups["tuning"] | groups["settings of --wrap"]) & groups["settings"]


def test_the_long_help_shows_choices_variables_and_defaults() -> None:
    text = " ".join(build_parser(everything=True).format_help().split())
    for setting in read_all_settings({}):
        if setting.flag:
            default = "" if setting.default in (False, "") else f"default: {setting.default}; "
            assert f"({default}{setting.variable})" in text
            assert not setting.choices or f"{setting.flag} {{{','.join(setting.choices)}}}" in text
    assert "default: )" not in text and "None" not in text and "==" not in text


BAD = {
    "no command was given": [],
    "two is not a number of ranks; use 1 or more, auto or gpu": ["-np", "two", "true"],
    "unknown option --bogus. See": ["--bogus", "true"],
    "unknown option --trasnport. Did you mean --transport? See": ["--trasnport", "mpi", "true"],
    "unknown option -hostfil. Did you mean -hostfile?": ["-hostfil", "hosts", "true"],
    "--nproc-per-node is an option of torchrun that hvdrun does not have. Use -np N": ["--nproc-per-node=2", "true"],
    "0 is not a number of ranks": ["-np", "0", "true"],
    "The number of ranks is missing. Set it with -np": ["true", "--lr", "1"],
    "The number of ranks is missing: -np stands after train.py": ["train.py", "--lr", "1", "-np", "2"],
    "hvdrun's options go before the command, like: hvdrun -np 2 python": ["python", "train.py", "--hostfile=hosts"],
    "cannot be used together": ["-np", "1", "-H", "localhost", "--hostfile", "x", "true"],
    "is more than the 2 slots": ["-np", "3", "-H", "localhost:2", "true"],
    "Unknown host: nowhere.invalid": ["-np", "1", "-H", "nowhere.invalid", "true"],
    "is not a host name": ["-np", "1", "-H", "-oProxyCommand=touch /tmp/x", "true"],
    "cannot be read: No such file": ["-np", "1", "--hostfile", "missing", "true"],
    "has no hosts": ["-np", "1", "--hostfile", "/dev/null", "true"],
    "the program pyton is not on PATH. Check the spelling. Did you mean python?": ["-np", "1", "pyton", "train.py"],
    "the program ./nothing does not exist": ["-np", "1", "./nothing"],
    "./data.txt is not executable": ["-np", "1", "./data.txt"],
    "./folder is a directory": ["-np", "1", "./folder"],
    "folder is a directory, not a program": ["-np", "1", "folder"],
    "the command begins with an empty word": ["-np", "1", ""],
    "argument --transport: 'pigeon': use one of auto, ": ["-np", "1", "--transport", "pigeon", "true"],
    "write: hvdrun -np 2 python -c CODE. See": ["-c", "pass"],
    "the script trian.py does not exist in": ["-np", "1", "trian.py"],
    "Check the path. Did you mean train.py?": ["-np", "1", "python3", "-u", "-W", "error", "trian.py", "--lr", "1"],
    "the Python module packag does not exist": ["-np", "1", "-m", "packag"],
    "Did you mean package.train?": ["-np", "1", "-m", "package.trian"],
    "package is a package without __main__.py. Name a module in it: -m package.MODULE": ["-np", "1", "-m", "package"],
    "begins with an empty word. Check the quotes": ["-np", "1", "-m", ""],
    "--output-filename is empty": ["-np", "1", "--output-filename", "", "true"],
    "argument --min-np: 'nan': use a whole number. See": ["-np", "1", "--min-np", "nan", "true"],
    "argument --stall-check-s: stall_check_s is inf; it must be 0 or more, and finite": [
        *("-np", "1", "--stall-check-s", "inf", "true")
    ],
    "argument --fusion-bytes: 'x': ": ["-np", "1", "--fusion-bytes", "x", "true"],
    "The tuned settings in missing.json cannot be read: No such file": ["-np", "1", "--tuned", "missing.json", "true"],
    "-x NOT_SET_HERE: the variable is not set here": ["-np", "1", "-x", "NOT_SET_HERE", "true"],
    "'A-B' is not a variable's name": ["-np", "1", "-x", "A-B=1", "true"],
    "-x HVDKIT_RANK: hvdkit has no setting of this name. See hvdkit": ["-np", "1", "-x", "HVDKIT_RANK=1", "true"],
    "Did you mean HVDKIT_TRANSPORT?": ["-np", "1", "-x", "HVDKIT_TRANSPROT=mpi", "true"],
    "-x A contradicts --no-forward-env A": ["-np", "1", "-x", "A=1", "--no-forward-env", "A", "true"],
    "-x A is given twice": ["-np", "1", "-x", "A=1", "-x", "A=2", "true"],
    "--show-ranks 2: the ranks of this job are 0 to 1": ["-np", "2", "--show-ranks", "0,2", "true"],
    "--quiet contradicts --verbose": ["-np", "1", "-q", "--verbose", "true"],
    "--no-prefix contradicts --tag-output": ["-np", "1", "--no-prefix", "--tag-output", "true"],
    "--jsrun contradicts --launcher srun": ["-np", "1", "--jsrun", "--launcher", "srun", "true"],
    "-p is for ssh, which srun does not use": ["-np", "1", "-p", "22", "--launcher", "srun", "true"],
    "--gloo contradicts --transport": ["-np", "1", "--transport", "mpi", "--gloo", "true"],
    "--mpi contradicts --gloo": ["-np", "1", "--gloo", "--mpi", "true"],
    "--no-autotune contradicts --autotune": ["-np", "1", "--autotune", "--no-autotune", "true"],
    "-x HVDKIT_BIND=core contradicts the option": ["-np", "1", "--bind", "none", "-x", "HVDKIT_BIND=core", "true"],
    "--elastic-save-s has no effect without --elastic": ["-np", "1", "--elastic-save-s", "1", "true"],
    "--wrap-batch has no effect without --wrap": ["-np", "1", "--wrap-batch", "split", "true"],
    "straggler_percent is nan": ["-np", "1", "--straggler-percent", "nan", "true"],
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
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


def test_a_dry_run_needs_no_name_service(capfd: pytest.CaptureFixture[str]) -> None:
    assert hvdrun.main(["-H", "one.invalid:2,two.invalid:1", "--launcher", "ssh", "--dry-run", "true"]) == 0
    out, err = capfd.readouterr()
    assert "one.invalid:2,two.invalid:1" in out and "Unknown hosts: one.invalid, two.invalid. Check" in err


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
    script = "import sys; from hvdkit.launch.cli import hvdrun, options; options.build_parser(); print(*sys.modules)"
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
    assert settings.keys() == {setting.name for setting in read_all_settings({})}
    assert (settings["transport"]["value"], settings["transport"]["origin"]) == ("mpi", "HVDKIT_TRANSPORT")
    assert cli.main(["doctor", "--settings"]) == 0
    table = capsys.readouterr().out
    assert all(setting.variable in table for setting in read_all_settings({}))


def test_the_table_of_settings_loses_no_letter_on_a_narrow_console(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["doctor", "--settings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(line.index("meaning") for line in lines if "meaning" in line)
    meanings = "".join("".join(line[start:] for line in lines).split())
    assert [s.variable for s in read_all_settings({}) if "".join(s.help.split()) not in meanings] == []


def test_doctor_says_which_variable_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDKIT_FUSION_BYTES", "many")
    assert cli.main(["doctor", "--settings"]) == 2
    assert "HVDKIT_FUSION_BYTES='many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "mpi", "who"),
    [
        (
            "mpirun",
            Mpi("open_mpi", "Open MPI", "4.1.6", "mpirun"),
            "with this MPI (Open MPI 4.1.6) ranks cannot continue",
        ),
        ("mpirun", Mpi("mpich", "MPICH", "5.0", "mpirun"), "with this MPI (MPICH 5.0) ranks cannot continue"),
        ("srun", Mpi("open_mpi", "Open MPI", "5.0.11", "mpirun"), "ranks that srun has started cannot continue"),
        ("srun", None, "ranks that srun has started cannot continue"),
    ],
)
def test_where_no_rank_outlives_another_it_is_said_that_hvdrun_starts_again(
    launcher: str, mpi: Mpi | None, who: str
) -> None:
    job = Job(command=("true",), ranks=2, elasticity=Elasticity.SURVIVE, variables={"HVDKIT_ELASTIC": "1"})
    why = describe_restarts(job, SelectedLauncher(launcher=launcher, reason="", mpi=mpi))
    assert why.startswith(who) and "hvdrun starts the job again from its last checkpoint" in why
    instead = with_elasticity(job, Elasticity.RESTART)
    assert not instead.survives
    assert read_config(instead.variables).elastic_restarts
    ulfm = SelectedLauncher(launcher="mpirun", reason="", mpi=Mpi("open_mpi", "Open MPI", "5.0.11", "mpirun"))
    assert describe_restarts(job, ulfm) == ""


def test_verbose_does_not_print_the_values_of_x() -> None:
    main = "import sys; from hvdkit.launch.cli.hvdrun import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", main, "-np", "1", "--verbose", "-x", "A_TOKEN=sesame", "true"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "A_TOKEN=..." in result.stderr
    assert "sesame" not in result.stdout + result.stderr


def test_an_error_in_a_config_file_names_the_file_and_hvdruns_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("params:\n  fusion_threshold_mb: nan\n")
    with pytest.raises(SystemExit):
        parse_arguments(["--config-file", str(file), "true"])
    error = capsys.readouterr().err
    assert error.startswith(f"hvdrun: {file}: ")
    assert error.endswith(" See hvdrun --help.\n")
