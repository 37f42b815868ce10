"""hvdkit hosts, and the options of hvdrun that say how to read a list of hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planned_job import plan_job

from hvdkit import cli
from hvdkit.launch.cli import hvdrun
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.hostfiles import DIALECTS, Host


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2 max_slots=4\n")
    (tmp_path / "bare").write_text("n1\nn2\n")
    (tmp_path / "bad").write_text("n1 slots=two\n\n-oProxyCommand=x\n")


def test_a_list_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", "hosts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hosts (Open MPI)"
    assert lines[-1] == "2 hosts, 4 slots"
    assert any(line.split() == ["n2", "2", "4"] for line in lines)


def test_a_list_is_written_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", "bare", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["hosts"][0] == {"name": "n1", "slots": None, "max_slots": None, "user": ""}
    assert answer["notes"][0] in err


@pytest.mark.parametrize("target", ["table", "json", *DIALECTS])
def test_every_target_is_written(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", "-H", "n[1-2]:2", "--to", target]) == 0
    out = capsys.readouterr().out
    assert "n1" in out or "n[1-2]" in out


def test_converted_lists_go_to_stdout_and_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", "hosts", "--to", "hydra"]) == 0
    assert capsys.readouterr() == (
        "n1:2\nn2:2\n",
        "hvdkit hosts: max_slots of n2 is left out: the format of MPICH has no field for it.\n",
    )


def test_the_dialect_of_the_file_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", "bare", "--from", "pbs", "--to", "openmpi"]) == 0
    assert capsys.readouterr() == ("n1 slots=1\nn2 slots=1\n", "")
    assert cli.main(["hosts", "bare", "--from", "intel", "--slots-per-host", "4", "--to", "machinefile"]) == 0
    assert capsys.readouterr() == ("n1:4\nn2:4\n", "")


def test_the_hosts_of_the_job_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["hosts", "--to", "horovod"]) == 0
    assert capsys.readouterr().out == "n1 slots=2\nn2 slots=1\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No hosts were given"),
        (["missing"], "missing: cannot be read: No such file or directory. Check the path"),
        (["hosts", "--to", "pigeon"], "Unknown hostfile format 'pigeon'"),
        (["hosts", "--from", "pigeon"], "Unknown hostfile format 'pigeon'"),
        (["hosts", "-H", "a"], "cannot be used together"),
        (["bare", "--to", "hydra", "--from", "openmpi"], "it requires the slots of n1, n2 (use --slots-per-host N)"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["hosts", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert said in err


def test_a_list_comes_from_standard_input_too() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "hvdkit", "hosts", "--slots-per-host", "2", "--to", "slurm", "-"],
        input="n1\nn2\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert answer.stdout == "SLURM_JOB_NODELIST=n[1-2]\nSLURM_TASKS_PER_NODE=2(x2)\n"


@pytest.mark.parametrize(
    "main", [lambda: cli.main(["hosts", "bad"]), lambda: hvdrun.main(["--hostfile", "bad", "true"])]
)
def test_all_problems_are_told_and_nothing_is_started(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "bad:1: slots='two' is not a number" in err
    assert "bad:3: '-oProxyCommand=x'" in err
    assert "Traceback" not in err


def plan(*words: str) -> tuple[Host, ...]:
    return plan_job(parse_arguments([*words, "true"]), {"PATH": "/bin:/usr/bin"}).hosts


def test_hvdrun_takes_the_dialect_and_the_slots(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("localhost\n")
    assert plan("--hostfile", "here", "--hostfile-format", "hydra") == (Host("localhost", 1),)
    assert plan("--hostfile", "here", "--slots-per-host", "3") == (Host("localhost", 3),)
    assert plan("-H", "localhost", "--slots-per-host", "3") == (Host("localhost", 3),)


def test_hvdrun_says_how_it_read_a_file_that_has_two_meanings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").write_text("localhost\n")
    assert hvdrun.main(["-np", "1", "--hostfile", "here", "--dry-run", "true"]) == 0
    out, err = capfd.readouterr()
    assert err.startswith("hvdrun: here: read in the format of Open MPI")
    assert len(out.splitlines()) == 1
