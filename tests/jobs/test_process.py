"""Programs with a time limit: their results, and that nothing they started outlives the limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hvdkit.launch.process import read_tail, run_into_file, run_program

pytestmark = pytest.mark.timeout(30)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int) -> bool:
    while is_alive(pid):
        time.sleep(0.01)  # the mark's timeout ends this
    return True


def test_a_program_that_ends_gives_status_and_both_streams() -> None:
    result = run_program(["sh", "-c", "cat; echo right; echo wrong >&2; exit 3"], timeout_s=20)
    assert (result.status, result.stdout, result.stderr) == (3, "right\n", "wrong\n")
    assert result.output == "right\nwrong\n"
    assert result.ending == "it ended with status 3"


def test_text_is_the_input() -> None:
    assert run_program(["cat"], timeout_s=20, text="a\nb").stdout == "a\nb"


def test_merged_streams_keep_their_order() -> None:
    result = run_program(["sh", "-c", "echo a; echo b >&2; echo c"], timeout_s=20, merge=True)
    assert (result.stdout, result.stderr) == ("a\nb\nc\n", "")


def test_a_program_that_exceeds_the_limit_is_killed_with_all_that_it_started() -> None:
    result = run_program(["sh", "-c", "sleep 60 & echo $!; sleep 60"], environ=os.environ, timeout_s=0.5)
    assert result.status is None
    assert result.ending == "it did not end within 0.5 s"
    assert wait_for_end(int(result.stdout))


def test_a_process_left_behind_with_the_pipe_open_does_not_change_the_status() -> None:
    result = run_program(["sh", "-c", "sleep 60 & echo $!; exit 4"], timeout_s=0.5)
    assert result.status == 4
    assert wait_for_end(int(result.stdout))


def test_a_program_that_does_not_exist_has_the_shells_status_and_the_reason() -> None:
    result = run_program(["/no/such/program"], timeout_s=1)
    assert result.status == 127
    assert "No such file" in result.stderr


def test_a_signal_is_named() -> None:
    assert run_program(["sh", "-c", "kill -SEGV $$"], timeout_s=20).ending == "it was killed by SIGSEGV"


def test_output_goes_to_a_file_and_the_limit_ends_the_program(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert run_into_file(["sh", "-c", "echo a; echo b >&2; exit 5"], output=output, timeout_s=20) == 5
    assert read_tail(output, 1) == ["b"]
    assert run_into_file(["sh", "-c", "echo $$; exec sleep 60"], output=output, timeout_s=0.5) is None
    assert not is_alive(int(read_tail(output, 1)[0]))


def test_the_limit_ends_also_what_the_program_leaves_behind(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert run_into_file(["sh", "-c", "sleep 60 & echo $!; exec sleep 60"], output=output, timeout_s=0.5) is None
    assert wait_for_end(int(read_tail(output, 1)[0]))
