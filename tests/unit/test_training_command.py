"""The two forms in which commands take a training, and what becomes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from refused import refused

from hvdkit.tools import training_command
from hvdkit.tools.training_command import HvdrunOption, find_launcher, plan_command, split_command

HVDRUN = [sys.executable, "-m", "hvdkit.launch"]
TWO = HvdrunOption("np", ("-np", "2"))


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_command, "find_hosts", lambda *_: None)


@pytest.mark.parametrize(
    ("command", "hvdrun", "planned"),
    [
        (["--", "python", "a.py"], [TWO], [*HVDRUN, "-np", "2", "--", "python", "a.py"]),
        (["a.py"], [], [*HVDRUN, "-np", "2", "--", "a.py"]),
        (
            ["python3", "a.py"],
            [HvdrunOption("tcp", ("--tcp",))],
            [*HVDRUN, "--tcp", "-np", "2", "--", "python3", "a.py"],
        ),
        (["/usr/bin/srun", "-n", "2", "a"], [], ["/usr/bin/srun", "-n", "2", "a"]),
        (["torchrun", "--nproc-per-node", "2", "a.py"], [], ["torchrun", "--nproc-per-node", "2", "a.py"]),
        (["./starts_its_ranks.sh"], [], ["./starts_its_ranks.sh"]),
        (["./one_rank"], [TWO], [*HVDRUN, "-np", "2", "--", "./one_rank"]),
    ],
)
def test_ranks_and_a_script_go_to_hvdrun_and_other_commands_run_as_they_are(
    command: Sequence[str], hvdrun: Sequence[HvdrunOption], planned: Sequence[str]
) -> None:
    assert plan_command(command, hvdrun) == planned


def test_an_allocation_places_ranks_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_command, "find_hosts", lambda *_: "an allocation")
    assert plan_command(["a.py"], []) == [*HVDRUN, "--", "a.py"]


@pytest.mark.parametrize(
    ("command", "words", "script"),
    [
        (
            ["hvdrun", "-np", "3", "--wrap", "python", "a.py", "-np", "9"],
            ["-np", "3", "--wrap"],
            ["python", "a.py", "-np", "9"],
        ),
        ([*HVDRUN, "--hostfile", "h", "--", "a"], ["--hostfile=h"], ["a"]),
        (["mpirun", "-n", "3", "python", "a.py"], ["-np", "3"], ["python", "a.py"]),
        (["srun", "--ntasks=3", "./a"], ["-np", "3"], ["./a"]),
        (["hvdrun", "-np3", "-m", "package", "-x"], ["-np", "3", "-m"], ["package", "-x"]),
        (["accelerate", "launch", "--num_processes", "3", "a.py"], ["-np", "3"], [sys.executable, "a.py"]),
        (["torchrun", "--nproc_per_node=3", "a.py"], ["-np", "3"], [sys.executable, "a.py"]),
        (["python", "a.py"], ["-np", "2"], ["python", "a.py"]),
    ],
)
def test_a_launchers_command_is_split(command: Sequence[str], words: Sequence[str], script: Sequence[str]) -> None:
    options, found = split_command(command, [] if find_launcher(command) else [TWO])
    assert [word for option in options for word in option.words] == words
    assert found == script


def test_what_cannot_be_translated_is_refused() -> None:
    with refused("launcher-option", names=["--map-by of mpirun"]):
        split_command(["mpirun", "-np", "2", "--map-by", "core", "a"], [])
    with refused("launcher-given-twice", names=["-np and mpirun"]):
        split_command(["mpirun", "-np", "2", "a"], [TWO])
    with refused("hvdrun-option-invalid", names=["hvdrun: ", "-np", ": 0 "]):
        split_command(["hvdrun", "-np", "0", "a"], [])
