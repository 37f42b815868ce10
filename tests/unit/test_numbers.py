"""Numbers on command lines: what each option takes, and the sentence for what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdkit import cli as hvdkit_cli
from hvdkit.launch.cli import hvdrun
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.ranges import read_counts, read_ranges, split_range
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.hosts import surveyor
from hvdkit.tools.doctor.hosts.session import AgentLost, AgentSession
from hvdkit.tools.doctor.survey import Failure


@pytest.mark.parametrize(
    "words", [["-n", "2"], ["-n2"], ["-np", "2"], ["-np2"], ["-np=2"], ["--num-proc=2"], ["--np", "2"]]
)
def test_the_number_of_ranks_is_written_as_for_other_launchers(words: list[str]) -> None:
    options = parse_arguments([*words, "python", "train.py", "-np7", "-n", "8"])
    assert (options.np, options.command) == (2, ("python", "train.py", "-np7", "-n", "8"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-np", "0"], "0 is not a number of ranks; use 1 or more, auto or gpu"),
        (["-np", "p"], "p is not a number of ranks"),
        (["-np2x"], "unknown option -np2x"),
        (
            ["-ppn", "2"],
            "-ppn is an option of mpiexec that hvdrun does not have. Use --slots-per-host N, or -H host1:N",
        ),
        (["-ppn2"], "-ppn is an option of mpiexec that hvdrun does not have"),
        (["-c", "pass"], "-c is an option of mpirun that hvdrun does not have. Use -np N"),
        (["-p", "65536"], "65536 is not a port; use 1 to 65535."),
        (["--metrics-port", "65536"], "65536 is not a port; use 1 to 65535, or 0 for any free port."),
        (["--start-timeout", "-5"], "-5 is not a number of seconds; use more than 0"),
        (["--start-timeout", "0"], "0 is not a number of seconds; use more than 0"),
        (["--start-timeout", "nan"], "nan is not a number of seconds; use more than 0"),
        (["--start-timeout", "inf"], "inf is not a number of seconds; use more than 0"),
        (["--start-timeout", "soon"], "soon is not a number of seconds; use more than 0"),
        (["--save-timeout", "-1"], "-1 is not a number of seconds; use 0 or more"),
        (["--elastic-timeout", "nan"], "nan is not a number of seconds; use 0 or more"),
        (["--blacklist-cooldown-range", "nan", "3"], "nan is not a number of seconds; use more than 0"),
        (["--slots-per-host", "0"], "0 is not a whole number of at least 1"),
        (["--show-ranks", "2-1"], "2-1 is not a list of ranks: the range 2-1 is descending"),
        (["--show-ranks", "-1"], "-1 is not a list of ranks"),
        (["--reset-limit", "-1"], "-1 is not a whole number of at least 0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments([*words, "true"])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--timeout", "nan", "--", "true"],
        ["compare", "-np", "0", "--", "true"],
        ["bench", "allreduce", "--seconds", "-1"],
        ["doctor", "-np", "-2"],
    ],
    ids=lambda words: words[0] + words[1],
)
def test_the_other_commands_refuse_such_numbers_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hvdkit_cli.main(words)
    assert end.value.code == 2
    assert f"{words[words.index(next(w for w in words if w[:1] == '-')) + 1]} is not a" in capsys.readouterr().err


def test_a_working_directory_that_has_been_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["--output-filename", "logs", "true"], ["no_such_script.py"], ["--dry-run", "true"]):
        assert hvdrun.main(["-np", "2", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("hvdrun: the working directory has been removed") and said.count("\n") == 1


def test_doctor_reaches_hosts_with_hvdruns_port_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.touch()
    lines: list[list[str]] = []

    async def start(argv: list[str], environ: dict[str, str]) -> AgentSession:
        lines.append(argv)
        raise AgentLost(Failure(255, "refused"))

    monkeypatch.setattr(AgentSession, "open", start)
    monkeypatch.setattr(surveyor, "collect", lambda environ: HostFacts())
    assert hvdkit_cli.main(["doctor", "-H", "node9:1", "-p", "2222", "-i", str(key), "--via", "ssh"]) == 1
    (line,) = lines
    assert line[line.index("-p") : line.index("-p") + 4] == ["-p", "2222", "-i", os.fspath(key)]
    assert line.index("-i") < line.index("--") < line.index("node9")


def test_ranges_and_counts_of_schedulers_hosts_and_cpus() -> None:
    assert read_ranges("0-3,8,2") == [0, 1, 2, 3, 8, 2]
    assert split_range("001-004") == ("001", "004") and split_range("7") == ("7", "7")
    assert read_counts("2(x3),1") == [2, 2, 2, 1] and read_counts("") == []
    assert read_ranges("0-9", 10) == list(range(10))
    for wrong in ("", "a", "3-1", "1-", "-1", "1,,2", "0-10"):
        with pytest.raises(ValueError, match=r"range|more than 10 numbers"):
            read_ranges(wrong, 10)
    for wrong in ("x", "2(x)", "2(x11)"):
        with pytest.raises(ValueError, match="count"):
            read_counts(wrong, 10)
