"""Scripts that ranks start, and programs that start ranks: a child that would wait for ever is refused, no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hvdrun_job import HVDRUN, environment

pytestmark = pytest.mark.ranks

RANK = """
import subprocess, sys
from hvdkit.engine import runtime
runtime.init()
world = runtime.runtime("test").world
print("rank", world.rank, "of", world.size, flush=True)
"""
#: Rank 1 starts a script with init(), through a shell, and all ranks meet afterwards.
PARENT = (
    RANK
    + """
if world.rank == 1:
    words = [sys.executable, sys.argv[1]]
    done = subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", *words], capture_output=True, text=True)
    print("child", done.returncode, done.stdout, done.stderr.strip().splitlines()[-1])
runtime.shutdown()
"""
)
#: A program that prepares a rank, has its variables, and calls nothing of hvdkit.
WRAPPER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, sys.argv[1]]).returncode)"
NESTED = (
    RANK
    + """
if world.rank == 0:
    nested = [sys.executable, "-m", "hvdkit.launch", "-np", "3", "--no-prefix", sys.executable, sys.argv[1]]
    print(subprocess.run(nested, capture_output=True, text=True, check=True).stdout)
"""
)
AFTER_SHUTDOWN = (
    RANK
    + """
runtime.shutdown()
sys.exit(subprocess.run([sys.executable, sys.argv[1]]).returncode)
"""
)


def run(script: str, tmp_path: Path, ranks: int = 3) -> list[str]:
    for name, text in {"child.py": RANK, "script.py": script}.items():
        (tmp_path / name).write_text(text)
    argv = [*HVDRUN, "-np", str(ranks), "--no-prefix", sys.executable, "script.py", "child.py"]
    done = subprocess.run(
        argv, env=environment(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return sorted(filter(None, done.stdout.splitlines()))


RANKS = [f"rank {rank} of 3" for rank in range(3)]


def test_a_script_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    child, *ranks = run(PARENT, tmp_path)
    assert ranks == RANKS
    assert child.startswith("child 1  hvdkit.errors.WorldError: init() was called in process ")
    assert "which rank 1 (process " in child and "hvdrun -np 1 SCRIPT" in child


def test_a_script_that_a_wrapper_starts_is_a_rank(tmp_path: Path) -> None:
    assert run(WRAPPER, tmp_path) == RANKS


@pytest.mark.slow
def test_a_job_inside_a_rank_has_ranks_of_its_own(tmp_path: Path) -> None:
    assert run(NESTED, tmp_path) == sorted(RANKS + RANKS)


@pytest.mark.slow
def test_scripts_that_all_ranks_start_after_shutdown_take_their_places(tmp_path: Path) -> None:
    assert run(AFTER_SHUTDOWN, tmp_path) == sorted(RANKS + RANKS)
