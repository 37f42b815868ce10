"""An uncaught exception is shown with its rank and ends the job."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import os, sys, threading
from hvdkit.hook import install_exception_hook, uninstall_exception_hook
def abort(status):
    print("aborted with", status, flush=True)
    os._exit(50 + status)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, timeout=60)


def test_traceback_comes_with_rank_and_host_and_then_the_abort() -> None:
    done = run("install_exception_hook(3, 'node2', abort)\nprint('before', end='')\nraise ValueError('bad number')")
    assert done.returncode == 51
    assert done.stdout == "beforeaborted with 1\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "hvdkit: rank 3 on node2 failed with ValueError; ending the job."
    assert lines[1].startswith("Traceback") and lines[-1] == "ValueError: bad number"


DEEP = """
import logging, hvdkit
code = "def deep(left, call): return deep(left - 1, call) if left else call()\\ndef fail(): raise ValueError('own')"
exec(compile(code, os.path.join(os.path.dirname(hvdkit.__file__), "x.py"), "exec"))
install_exception_hook(0, 'here', None)
def script(): raise ValueError('the script')
"""


def test_frames_of_hvdkit_are_left_out_but_for_the_one_that_raised() -> None:
    note = "  ... 3 frames of hvdkit (HVDKIT_LOG_LEVEL=debug shows them)"
    frames = [line for line in run(DEEP + "deep(2, script)").stderr.splitlines() if line.startswith("  ")]
    assert "in <module>" in frames[0] and frames[1] == note and "in script" in frames[2]
    said = run(DEEP + "try: deep(2, script)\nexcept ValueError: deep(2, fail)").stderr
    assert said.count(note) == 2 and said.count("x.py") == 1 and "in fail" in said
    assert "in deep" in run(DEEP + "deep(0, script)").stderr  # one frame is as short as a note


def test_a_log_level_shows_all_frames() -> None:
    said = run(DEEP + "logging.getLogger('hvdkit').setLevel('DEBUG')\ndeep(2, script)").stderr
    assert said.count("in deep") == 3 and "frames of hvdkit" not in said


@pytest.mark.parametrize("error, status", [("ValueError", 1), ("KeyboardInterrupt", 130)])
def test_without_abort_the_process_itself_ends_at_once(error: str, status: int) -> None:
    done = run(
        "import atexit; atexit.register(lambda: print('a finalizer'))\n"
        f"install_exception_hook(0, 'here', None)\nraise {error}"
    )
    assert done.returncode == status
    assert "rank 0 on here" in done.stderr and done.stdout == ""


def test_interrupt_is_passed_to_abort_as_130() -> None:
    assert run("install_exception_hook(0, 'here', abort)\nraise KeyboardInterrupt").stdout == "aborted with 130\n"


def test_sys_exit_is_no_failure() -> None:
    done = run("install_exception_hook(0, 'here', abort)\nsys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_the_programs_own_hook_is_called() -> None:
    done = run(
        "sys.excepthook = lambda kind, error, where: print('own hook', error)\n"
        "install_exception_hook(1, 'here', abort)\nraise ValueError('x')"
    )
    assert done.stdout == "own hook x\naborted with 1\n" and done.returncode == 51
    assert done.stderr == "hvdkit: rank 1 on here failed with ValueError; ending the job.\n"


def test_a_later_hook_that_collects_what_ours_says_loses_nothing() -> None:
    done = run(
        "import contextlib, io\ninstall_exception_hook(1, 'here', abort)\nours = sys.excepthook\n"
        "def collect(*error):\n    with contextlib.redirect_stderr(io.StringIO()):\n        ours(*error)\n"
        "sys.excepthook = collect\nraise ValueError('x')"  # as torch.distributed does
    )
    assert done.returncode == 51
    assert "rank 1 on here failed" in done.stderr and "ValueError: x" in done.stderr


def test_the_job_ends_even_if_the_programs_own_hook_fails() -> None:
    done = run("sys.excepthook = lambda *a: 1 / 0\ninstall_exception_hook(1, 'here', abort)\nraise ValueError('x')")
    assert done.returncode == 51


def test_the_job_ends_even_if_abort_fails() -> None:
    done = run("install_exception_hook(1, 'here', lambda status: 1 / 0)\nraise ValueError('x')")
    assert done.returncode == 1 and "ValueError: x" in done.stderr


def test_uninstall_puts_the_former_hook_back() -> None:
    done = run(
        "former = sys.excepthook\ninstall_exception_hook(0, 'a', abort)\ninstall_exception_hook(1, 'b', abort)\n"
        "uninstall_exception_hook()\nassert sys.excepthook is former\nuninstall_exception_hook()\n"
        "assert sys.excepthook is former"
    )
    assert done.returncode == 0, done.stderr


def test_uninstall_leaves_a_later_hook_in_place() -> None:
    done = run(
        "install_exception_hook(0, 'a', abort)\nlater = lambda *a: None\nsys.excepthook = later\n"
        "uninstall_exception_hook()\nassert sys.excepthook is later"
    )
    assert done.returncode == 0, done.stderr


def test_other_threads_are_left_alone() -> None:
    done = run(
        "former = threading.excepthook\ninstall_exception_hook(0, 'a', abort)\nassert threading.excepthook is former\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\nprint('still here')"
    )
    assert done.returncode == 0 and done.stdout == "still here\n" and "ZeroDivisionError" in done.stderr


def test_an_error_of_hvdkit_comes_with_a_command_that_describes_it() -> None:
    done = run(
        "from hvdkit.errors import RankLostError\ninstall_exception_hook(0, 'here', None)\nraise RankLostError('x')"
    )
    command = "python -m pydoc hvdkit.errors.RankLostError"
    assert done.stderr.splitlines()[0].endswith(f"`{command}` describes it.")
    said = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True, timeout=60).stdout
    assert "Another rank has ended while this rank was waiting for it." in said
