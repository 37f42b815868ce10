"""The examples of docs/extensions do on three ranks what their pages say: a transport, a strategy and a writer."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from bucket_checks import BUCKET_CHECKS
from naive import random_numbers_as_naive
from package_entry_points import plant_package
from phase_checks import PHASE_CHECKS
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, weights
from transport_checks import CHECKS

import hvdkit.torch as hvd
from examples.extensions.clipped_average import ClippedAverage
from examples.extensions.json_lines import JsonLines
from examples.extensions.pickled_transport import PickledTransport
from hvdkit.errors import PlanMismatchError, TrackError
from hvdkit.tracking.targets import ENTRY_POINTS
from hvdkit.tracking.writer import End
from hvdkit.tracking.writing_thread import WritingThread

pytestmark = pytest.mark.ranks

# The table of tests/ranks/test_transports.py without messages from rank to rank, which the example does not have.
TABLES = {
    "collectives": {**CHECKS, "random_numbers_as_naive": random_numbers_as_naive},
    "buckets": BUCKET_CHECKS,
    "phases": PHASE_CHECKS,
}
#: Of each table, those that need few exchanges.
QUICK = {
    "collectives": (
        "alltoall_uneven",
        "subgroups_number_ranks_in_the_order_given",
        "a_closed_transport_says_so",
        "arguments_that_do_not_fit_are_refused",
    ),
    "buckets": ("buckets_plans_and_collectives_side_by_side",),
    "phases": ("phases_a_changed_shard_reaches_all", "phases_phases_and_allreduces_in_one_plan"),
}


def check_transport(table: str, names: Sequence[str]) -> None:
    from mpi4py import MPI

    transport = PickledTransport(MPI.COMM_WORLD.Dup())
    for name in names:
        TABLES[table][name](transport)
    transport.close()


@pytest.mark.parametrize("table", TABLES)
def test_the_transport_conforms(table: str) -> None:
    run_ranks(3, check_transport, table, QUICK[table])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("table", TABLES)
def test_the_transport_passes_the_whole_table(table: str, size: int) -> None:
    run_ranks(size, check_transport, table, list(TABLES[table]), timeout=180)


CASE = Case("SGD", {"lr": 0.5}, steps=6)
MAX_NORM = 0.8


def train(strategy: ClippedAverage | None, rank: int, of: int, size: int) -> tuple[Weights, list[float]]:
    """The parameters, and the length of each step's gradients; without a strategy one process clips them itself."""
    model, optimizer = CASE.make()
    if strategy is not None:
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)
    rows, lengths = size * CASE.rows // of, []
    for step in range(CASE.steps):
        inputs, targets = CASE.batch(step, 0, size)
        mine = slice(rank * rows, (rank + 1) * rows)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        length = float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads if grad is not None])))
        if strategy is None and length > MAX_NORM:
            for grad in grads:
                assert grad is not None
                grad *= MAX_NORM / length
        optimizer.step()
        lengths.append(length)
    return weights(model), lengths


def train_together() -> Weights:
    with joined():
        return train(ClippedAverage(MAX_NORM), hvd.rank(), hvd.size(), hvd.size())[0]


def test_the_strategy_trains_as_one_process() -> None:
    expected, lengths = train(None, 0, 1, 3)
    assert min(lengths) < MAX_NORM < max(lengths), "some steps are to be clipped, and some are not"
    assert_alike(run_ranks(3, train_together), expected, 1e-10)


def attach_differently() -> str:
    with joined():
        try:
            train(ClippedAverage(1.0 + hvd.rank()), hvd.rank(), hvd.size(), hvd.size())
        except PlanMismatchError as error:
            return str(error)
    return ""


def test_ranks_with_different_limits_do_not_train() -> None:
    for text in run_ranks(3, attach_differently):
        assert "max_norm=1.0" in text and "max_norm=2.0" in text


def track(path: str, packages: str) -> None:
    """Log with the example as the writer of an installed package. packages: folder of it."""
    with joined(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        with hvd.track(writers={"json_lines": path if hvd.rank() == 0 else "not written"}, every=2) as tracker:
            for step in range(3):
                tracker.log({"loss": step + hvd.rank(), "share": float("nan")}, step=10 * step)


def test_the_writer_gets_averages_of_all_ranks(tmp_path: Path) -> None:
    plant_package(
        tmp_path, "planted_writers", "", ENTRY_POINTS, {"json_lines": "examples.extensions.json_lines:JsonLines"}
    )
    run_ranks(3, track, str(tmp_path / "logs" / "run.jsonl"), str(tmp_path))
    assert not Path("not written").exists()
    rows = [json.loads(line) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"], row["share"]) for row in rows] == [
        (0, 1.0, None),
        (10, 2.0, None),
        (20, 3.0, None),
    ]


def track_a_lock(packages: str) -> str:
    with joined(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        try:
            hvd.track(writers={"json_lines": threading.Lock()})
        except TrackError as error:
            return str(error)
    return ""


def test_a_target_that_cannot_be_sent_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    point = {"json_lines": "examples.extensions.json_lines:JsonLines"}
    plant_package(tmp_path, "planted_writers", "", ENTRY_POINTS, point)
    for text in run_ranks(3, track_a_lock, str(tmp_path)):
        assert "cannot pickle" in text


@pytest.mark.parametrize("end, last", [("FINISHED", []), (None, []), ("FAILED", [{"end": "FAILED"}])])
def test_the_writer_appends_and_notes_how_a_run_has_failed(end: End | None, last: object, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for step in range(2):
        writing = WritingThread([JsonLines(path)])
        writing.put([(step, {"loss": np.float64(0.5)})])
        writing.close(end if step else "FINISHED", 60)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[:2] == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.5}] and lines[2:] == last
