"""hvdkit as a backend of torch.distributed: its collectives, messages and groups are Gloo's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import process_group_checks as checks
import process_group_trainings as trainings
import pytest
from ranks import run_ranks

pytest.importorskip("torch")

BODIES = [
    checks.check_reductions,
    checks.check_copies,
    checks.check_messages,
    checks.check_asynchronous,
    checks.check_refusals,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_operations_are_those_of_gloo(body: Callable[[], None], size: int) -> None:
    run_ranks(size, body)


@pytest.mark.parametrize("body", [checks.check_reductions, checks.check_copies], ids=lambda body: body.__name__)
def test_one_rank(body: Callable[[], None]) -> None:
    run_ranks(1, body)


def test_groups_of_a_mesh() -> None:
    run_ranks(4, checks.check_groups)


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


@pytest.mark.slow
def test_two_kinds_of_parallelism_on_a_mesh() -> None:
    run_ranks(4, trainings.check_fsdp_and_tensor_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("name", trainings.ONE_STAGE + trainings.MORE_STAGES + trainings.V_STAGES)
def test_schedules_of_pipelines(name: str) -> None:
    run_ranks(2, trainings.check_pipeline, name)


@pytest.mark.slow
def test_checkpoints_of_shards(tmp_path: Path) -> None:
    run_ranks(2, trainings.check_checkpoint, str(tmp_path))
