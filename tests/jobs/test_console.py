"""Output that cannot be written: a reader that has ended, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import quick_ones

from hvdkit.errors import HvdkitError
from hvdkit.launch.cli.console import run_command

SIGPIPE = 128 + signal.SIGPIPE
COMMANDS = {
    "a large table": [sys.executable, "-m", "hvdkit", "hosts", "-H", "n[1-20000]:2"],
    "one line": [sys.executable, "-m", "hvdkit", "hosts", "-H", "node1:2", "--to", "pbs"],
    "a dry run": [sys.executable, "-m", "hvdkit.launch", "-np", "1", "--dry-run", "true"],
    "a completion script": [sys.executable, "-m", "hvdkit.launch", "--print-completion", "bash"],
}


@pytest.mark.parametrize("name", quick_ones(COMMANDS, next(iter(COMMANDS))))
def test_a_reader_that_has_ended_ends_the_command_without_a_word(name: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        done = subprocess.run(COMMANDS[name], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == SIGPIPE
    assert not [line for line in done.stderr.splitlines() if "mpirun: all ranks are on this machine" not in line]


@pytest.mark.parametrize("name", quick_ones(COMMANDS, list(COMMANDS)[-1]))
def test_a_full_disk_is_one_line(name: str) -> None:
    with Path("/dev/full").open("wb") as stdout:
        done = subprocess.run(COMMANDS[name], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1].replace("the output or a file", "the output")  # so if stdout has no buffer
    assert "the output cannot be written: No space left on device." in last


@pytest.mark.ranks
def test_a_job_whose_output_cannot_be_written_ends_and_says_why() -> None:
    command = [sys.executable, "-m", "hvdkit.launch", "-np", "2", "sh", "-c", "echo line; sleep 100"]
    with Path("/dev/full").open("wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "hvdrun: the output cannot be written: No space left on device; ended 2 ranks.\n"


def test_an_error_is_one_line_and_ctrl_c_has_the_shells_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise HvdkitError("no host")

    def interrupt() -> int:
        raise KeyboardInterrupt

    assert run_command("hvdkit hosts", fail) == 2
    assert capsys.readouterr().err == "hvdkit hosts: no host\n"
    assert run_command("hvdrun", interrupt) == 130
    assert run_command("hvdrun", lambda: 3) == 3


def test_a_full_disk_is_not_blamed_on_the_output_alone_if_that_can_be_written() -> None:
    command = "import sys; from hvdkit.launch.cli.console import run_command; "
    command += "sys.exit(run_command('hvdkit submit', lambda: open('/dev/full', 'w').write('x' * 100000)))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "hvdkit submit: the output or a file cannot be written: No space left on device."
    )


def test_a_broken_pipe_of_something_else_than_stdout_is_an_error() -> None:
    def fail() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_command("hvdrun", fail)


def test_closed_streams_are_open_on_dev_null_during_a_command() -> None:
    command = """
import os, sys
from hvdkit.launch.cli.console import run_command
def describe():
    print("not seen")
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    return 3 if streams == [os.devnull] * 3 and os.get_inheritable(1) else 4
sys.exit(run_command("hvdkit hosts", describe))
"""
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, command], timeout=60)
    assert done.returncode == 3
