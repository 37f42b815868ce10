"""Workers of a DataLoader that are forked after init(): training works, all processes end, nothing hangs at exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_job import find_mpirun

TESTS = Path(__file__).parents[1] / "support"


def _run(case: str, progress: str, job: Path = TESTS / "fork_job.py") -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS.parents[1]), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HVDKIT_PROGRESS": progress,
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^ofi,uct",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    command = [*find_mpirun(), "-n", "2", sys.executable, str(job), case]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=90)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "progress"),
    [
        pytest.param("workers", "thread", marks=pytest.mark.slow),
        pytest.param("fork", "thread", marks=pytest.mark.slow),
        ("calls", "inline"),
    ],
)
def test_forked_workers_come_and_go(case: str, progress: str) -> None:
    done = _run(case, progress)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 done, 0.000000 apart", "rank 1 done, 0.000000 apart"]
    assert "hvdkit" not in done.stderr


@pytest.mark.ranks
def test_a_worker_that_dies_ends_the_job() -> None:
    done = _run("dies", "inline")
    assert done.returncode != 0, done.stderr
    assert "done" not in done.stdout


STARTS_RANKS = """
import multiprocessing
import os
import socket

if __name__ != "__main__":
    import hvdkit.torch as hvd
    hvd.init()

def work():
    print(f"rank {hvd.rank()} of {hvd.size()}\\n", end="")

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = "2"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0", TORCHELASTIC_RUN_ID="x")
    children = []
    for rank in range(2):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        children.append(spawn.Process(target=work))
        children[-1].start()
    for child in children:
        child.join(60)
"""


@pytest.mark.ranks
@pytest.mark.native("torchrun's variables are those of a launcher that Horovod's core does not know")
def test_a_parent_that_is_no_rank_may_spawn_ranks_that_import_the_script_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STARTS_RANKS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=90, cwd=tmp_path
    )
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"], done.stderr


UNGUARDED = """
import multiprocessing

import hvdkit.torch as hvd

hvd.init()
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print(f"rank {hvd.rank()}: the child ended with {child.exitcode}\\n", end="")
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_child_that_imports_the_script_again_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    done = _run("", "inline", tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"rank {rank}: the child ended with 1" for rank in (0, 1))]
    assert "WorldError: init() was called in a child process of rank 1, which imports the script again" in done.stderr
