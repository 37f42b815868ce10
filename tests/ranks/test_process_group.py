"""hvdkit as a backend of torch.distributed: its collectives, messages and groups are Gloo's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import process_group_checks as checks
import process_group_trainings as trainings
import pytest
from rank_job import find_mpirun
from ranks import RanksFailedError, run_ranks

from hvdkit.aliasing.torch_mpi import rename

pytest.importorskip("torch")

BODIES = [
    checks.check_reductions,
    checks.check_copies,
    checks.check_messages,
    checks.check_asynchronous,
    checks.check_callbacks,
    checks.check_refusals,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_operations_are_those_of_gloo(body: Callable[[], None], size: int) -> None:
    run_ranks(size, body)


@pytest.mark.parametrize(
    "body",
    [checks.check_reductions, pytest.param(checks.check_copies, marks=pytest.mark.slow)],
    ids=lambda body: body.__name__,
)
def test_one_rank(body: Callable[[], None]) -> None:
    run_ranks(1, body)


@pytest.mark.slow
def test_timeouts_in_callbacks() -> None:
    run_ranks(3, checks.check_timeouts_in_callbacks)


def test_groups_of_a_mesh() -> None:
    run_ranks(4, checks.check_groups)


def test_a_group_of_all_ranks_beside_another_backend() -> None:
    run_ranks(3, checks.check_beside_gloo)


@pytest.mark.parametrize("transport", ["mpi", "hierarchical_pairs"])
def test_other_transports(transport: str) -> None:
    """Of ranks on several hosts, which "hierarchical_pairs" plays on one."""
    run_ranks(4, checks.check_on, transport)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["collective", "asynchronous", "subgroup", "barrier", "message"])
def test_the_rank_that_was_killed_is_named(how: str) -> None:
    with pytest.raises(RanksFailedError) as failure:
        # mpirun ends the others with SIGTERM, which they ignore until they have their answer, and then with SIGKILL.
        run_ranks(3, checks.lose_rank_1, how, env={"PRTE_MCA_odls_base_sigkill_timeout": "20"}, grace=20)
    assert failure.value.ended == [1]
    assert "Rank 1 on host" in failure.value.results[0]


LAUNCHERS = {
    "hvdrun": [sys.executable, "-m", "hvdkit.launch", "-np", "2"],
    "mpirun": [*find_mpirun(), "-np", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_need_nothing_else(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(name="hvdkit", line="import hvdkit.torch"))
    python = [] if launcher == "torchrun" else [sys.executable]
    assert _run([*LAUNCHERS[launcher], *python, str(script)]) == ["hvdkit 3", "hvdkit 3"]


@pytest.mark.parametrize("name", ["mpi", pytest.param("hvdkit", marks=pytest.mark.slow)])
def test_hvdrun_answers_to_mpi(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(name=name, line="assert dist.is_mpi_available()"))
    assert _run([*LAUNCHERS["hvdrun"], "--mpi-backend", sys.executable, str(script)]) == ["hvdkit 3", "hvdkit 3"]


def test_names_of_backends() -> None:
    assert rename("mpi") == "hvdkit" and rename("MPI") == "hvdkit"
    assert rename("cpu:mpi,cuda:nccl") == "cpu:hvdkit,cuda:nccl"
    assert rename("gloo") == "gloo" and rename("cpu:gloo") == "cpu:gloo"


SCRIPT = """
import torch
import torch.distributed as dist
{line}
dist.init_process_group("{name}")
tensor = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(tensor)
print(f"said {{dist.get_backend()}} {{int(tensor)}}", flush=True)  # at once: ranks of torchrun share a pipe
dist.destroy_process_group()
"""


def _run(command: list[str]) -> list[str]:
    """What the ranks say."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"said (\w+ \d+)", done.stdout)


TRAININGS = [
    trainings.check_ddp,
    trainings.check_fsdp,
    trainings.check_tensor_parallel,
    trainings.check_zero_redundancy,
]


@pytest.mark.slow
@pytest.mark.parametrize("body", TRAININGS, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_as_one_process(body: Callable[[], None], size: int) -> None:
    run_ranks(size, body)


@pytest.mark.parametrize(
    "name",
    [name if name == "powerSGD_hook" else pytest.param(name, marks=pytest.mark.slow) for name in trainings.HOOKS],
)
def test_comm_hooks(name: str) -> None:
    run_ranks(3, trainings.check_comm_hook, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_hooks_that_step_a_divided_optimizer(name: str) -> None:
    run_ranks(3, trainings.check_zero_hook, name)


@pytest.mark.slow
def test_two_kinds_of_parallelism_on_a_mesh() -> None:
    run_ranks(4, trainings.check_fsdp_and_tensor_parallel)


@pytest.mark.slow
def test_the_same_mesh_in_two_worlds() -> None:
    run_ranks(4, trainings.check_the_same_mesh_in_two_worlds)


@pytest.mark.slow
@pytest.mark.parametrize("name", trainings.ONE_STAGE + trainings.MORE_STAGES + trainings.V_STAGES)
def test_schedules_of_pipelines(name: str) -> None:
    run_ranks(2, trainings.check_pipeline, name)


@pytest.mark.slow
def test_checkpoints_of_shards(tmp_path: Path) -> None:
    run_ranks(2, trainings.check_checkpoint, str(tmp_path))
