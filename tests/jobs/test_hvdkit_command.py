"""The command hvdkit: its subcommands, those of other packages, its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.errors import HvdkitError

PLUGIN = """
def add_command(commands):
    parser = commands.add_parser("measure-sky", help="look up")
    parser.add_argument("--height", type=int)
    parser.set_defaults(run=lambda options: options.height)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with two commands; the module of the second one is missing."""
    info = tmp_path / "sky-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sky\nVersion: 1.0\n")
    points = "measure-sky = sky_plugin:add_command\nbroken = no_such_module:add_command\ndoctor = sky_plugin:nothing\n"
    (info / "entry_points.txt").write_text(f"[{cli.ENTRY_POINTS}]\n{points}")
    (tmp_path / "sky_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def end(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_a_package_adds_a_command_and_replaces_none(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert end("measure-sky", "--height", "7") == 7
    assert end("--help") == 0
    help = capsys.readouterr().out
    assert "\nfrom other packages:\n" in help and "  measure-sky    look up\n" in help
    assert "  broken         the package sky cannot be loaded: ModuleNotFoundError" in help
    assert help.count("  doctor ") == 1
    assert end("broken") == 2
    assert capsys.readouterr().err.startswith("hvdkit broken: the package sky cannot be loaded: ModuleNotFoundError")


def test_every_command_is_in_the_help_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert end("--help") == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and "  " in line]
    assert {*cli.build_parser().commands.choices} <= {*rows} and len(rows) == len(set(rows))


WRONG = {
    "hvdkit completion: write: hvdkit --print-completion {bash,zsh,fish}. See hvdkit --help.": ["completion"],
    "hvdkit bench: the following arguments are required: WHAT. WHAT is one of allreduce, allgather, "
    "broadcast, alltoall, reducescatter, step. Example: hvdkit bench allreduce. See hvdkit bench --help.": ["bench"],
    "hvdkit submit: the following arguments are required: --time, command. Example: hvdkit submit --nodes 4 "
    "--tasks-per-node 8 --time 2h --dry-run -- python train.py. See hvdkit submit --help.": ["submit", "--nodes", "2"],
    "hvdkit plan: MODEL, --batch are missing. Example: hvdkit plan config.json --gpus 64 --batch 512. See hvdkit "
    "plan --help.": ["plan", "--gpus", "8"],
    "hvdkit: no command was given. See hvdkit --help.": [],
    "hvdkit: unknown argument --verbos. Did you mean --version? See hvdkit --help.": ["--verbos"],
    "hvdkit docter: there is no such command. Did you mean doctor? See hvdkit --help.": ["docter"],
    "hvdkit examples: unknown argument --jsn. Did you mean --json? See hvdkit examples --help.": ["examples", "--jsn"],
    "hvdkit hosts: unknown argument --slot-per-host. Did you mean --slots-per-host? See hvdkit hosts --help.": [
        *("hosts", "--slot-per-host", "3")
    ],
    "hvdkit hosts: argument --slots-per-host: x is not a whole number of at least 1. See hvdkit hosts --help.": [
        *("hosts", "--slots-per-host", "x")
    ],
    "hvdkit hosts: argument --slots-per-host: 0 is not a whole number of at least 1. See hvdkit hosts --help.": [
        *("hosts", "--slots-per-host", "0")
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_an_error_is_one_line_and_exit_code_2(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(*WRONG[message]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{message}\n")


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        argv = [sys.executable, "-m", "hvdkit", "hosts", "-H", "a:1"]
        ended = subprocess.run(argv, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_command_of_a_package_that_is_not_installed_has_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_PACKAGES", {"paint": "paint"})
    with pytest.raises(HvdkitError, match=r"pip install .* \./packages/paint"):
        cli.check_name("paint", ["doctor"])
    with pytest.raises(HvdkitError, match="Did you mean paint"):
        cli.check_name("pain", ["doctor"])
