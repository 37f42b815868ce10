"""Scripts started by torchrun, and by horovodrun without MPI: they train, and tell of a rank that is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gallery import ENOUGH, EPOCHS
from key_value_server import serve_values

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "pytorch_digits.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT_S = 120

pytestmark = [pytest.mark.ranks, pytest.mark.group("jobs")]


def write(tmp_path: Path, program: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nimport torch\nimport hvdkit.torch as hvd\n{program}")
    return str(script)


def run(command: Sequence[str], tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def torchrun(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *arguments], tmp_path, **env)


def expect_digits(done: subprocess.CompletedProcess[str], last: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert last in done.stdout.splitlines()[-1], done.stdout
    assert len(re.findall(r"epoch \d+  loss ", done.stdout)) == EPOCHS


@pytest.mark.slow  # the quick tier has a script under torchrun in test_torch_scripts.py
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_the_digits_are_learned_under_torchrun(tmp_path: Path, transport: str) -> None:
    name = "shared_memory" if transport == "auto" else transport
    done = torchrun(tmp_path, DIGITS, *ENOUGH, "--checkpoint", "digits.pt", HVDKIT_TRANSPORT=transport)
    expect_digits(done, f"2 ranks on 1 host ({os.uname().nodename}: 2), {name} transport")
    assert set(torch.load(tmp_path / "digits.pt")) == {"model", "optimizer"}


@pytest.mark.slow
def test_torchruns_plain_form_works_and_so_does_the_scripts_own_group(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
before = sys.argv[1] == "before"
if before:
    dist.init_process_group("gloo")
hvd.init()
if not before:
    dist.init_process_group("gloo")
theirs, ours = torch.ones(3) * hvd.rank(), hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)
dist.all_reduce(theirs)
carriers = f"{hvd.gloo_enabled()} {hvd.mpi_enabled()}"
print(f"rank {hvd.rank()} {dist.get_rank()} {carriers} {torch.equal(theirs, ours)}\\n", end="")
dist.destroy_process_group()
hvd.shutdown()
hvd.init()
assert hvd.allgather_object(hvd.rank()) == [0, 1]
"""
    script = write(tmp_path, program)
    for when in ("before", "after"):
        port = ["--master-port", str(free_port())] if when == "before" else ["--standalone"]
        done = run([*TORCHRUN, *port, "--nproc-per-node", "2", script, when], tmp_path)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"rank {rank} {rank} True False True" for rank in range(2)]


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_find_each_other_and_not_the_old_ones(tmp_path: Path) -> None:
    program = """
hvd.init()
assert hvd.allgather_object(hvd.rank()) == [0, 1]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if hvd.rank() == 1:
        os._exit(1)
    hvd.allreduce(torch.ones(1))
print(f"rank {hvd.rank()} again\\n", end="")
"""
    done = torchrun(tmp_path, "--max-restarts", "1", write(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 again", "rank 1 again"]


STEPS = """
hvd.init()
model = torch.nn.Linear(100, 100)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(10_000):
    if step == 20 and hvd.rank() == 1:
        print("it ends", flush=True)
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_torchrun_ends_with_the_rank_that_was_killed(tmp_path: Path, transport: str) -> None:
    done = torchrun(tmp_path, "--max-restarts", "0", write(tmp_path, STEPS), HVDKIT_TRANSPORT=transport)
    assert done.returncode == 1
    assert "it ends" in done.stdout
    # The other rank's own word, or torchrun's, which may be the first to notice.
    assert re.search(r"Rank 1 on host \S+ has died|rank +: 1 \(local_rank: 1\)\n.*exitcode +: -9", done.stderr)


@contextmanager
def horovod_ranks(size: int, command: Sequence[str], cwd: Path, **env: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with the variables that `horovodrun --gloo` sets, and nobody who would end them together."""
    with serve_values() as port:
        processes = [
            subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **_variables(rank, size, port), **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    values: dict[str, object] = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": size,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "HOSTNAME": "localhost",
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": "lo",
        "CONTROLLER": "gloo",
    }
    return {"HVDKIT_ENGINE": "native"} | {f"HOROVOD_{name}": str(value) for name, value in values.items()}


@pytest.mark.slow
def test_the_digits_are_learned_with_horovodruns_variables(tmp_path: Path) -> None:
    with horovod_ranks(2, [sys.executable, DIGITS, *ENOUGH], tmp_path) as ranks:
        out, errors = zip(*(rank.communicate(timeout=TIMEOUT_S) for rank in ranks), strict=True)
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    assert "2 ranks on 1 host (localhost: 2), shared_memory transport" in out[0]


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.slow), "gloo"])
def test_a_lost_rank_is_named_where_nobody_ends_the_others(tmp_path: Path, transport: str) -> None:
    command = [sys.executable, write(tmp_path, STEPS)]
    with horovod_ranks(3, command, tmp_path, HVDKIT_TRANSPORT=transport) as ranks:
        assert ranks[1].wait(TIMEOUT_S) == -signal.SIGKILL
        for rank in (0, 2):
            _, errors = ranks[rank].communicate(timeout=TIMEOUT_S)
            assert ranks[rank].returncode == 1
            assert "RankLostError: Rank 1 on host localhost has died" in errors
