"""What some ranks do not come to is told and ended on every path: steps of several, plans, buckets of gradients."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import quick_ones
from ranks import RanksFailedError, run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine import runtime as engine
from hvdkit.engine.replicate import compare_replicas
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.mpi.library import load_mpi

pytestmark = pytest.mark.native("Horovod reports what stalls itself, in its own words")


def _on(size: int, body: Callable[..., Any], *args: Any, over: str = "auto", **settings: Any) -> list[Any]:
    return run_ranks(size, _joined, body, args, {"transport": over, **settings}, timeout=60)


def _joined(body: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    with joined(**settings):
        return body(*args)


def _looks_at_the_sky(seconds: float, until: Path | None = None) -> None:
    """For so long, or until ranks 0 and 2 have written in this folder that they have seen what they are to see."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (until and {one.name for one in until.iterdir()} >= {"0", "2"}):
        time.sleep(0.05)


STEPS: dict[str, Callable[[], Any]] = {
    "broadcast_object": lambda: hvd.broadcast_object({"a": 1}),
    "allgather_object": lambda: hvd.allgather_object(hvd.rank()),
    "broadcast_parameters": lambda: hvd.broadcast_parameters({"w": torch.ones(3)}),
    "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([torch.ones(1)], 0.1)),
    "add_process_set": lambda: hvd.add_process_set([0, 1]),
    "plan": lambda: _one_step(),
    "check_replicas": lambda: compare_replicas(hvd.global_process_set.group("the test").engine, "here", []),
    "allgather_object.checkpoint": lambda: _in_a_folder(lambda folder: hvd.checkpoint.save(folder, epoch=1)),
    "broadcast_object.checkpoint": lambda: _in_a_folder(lambda folder: hvd.checkpoint.load(folder, epoch=1)),
    "checkpoints": lambda: _in_a_folder(lambda folder: hvd.checkpoint.Checkpoints(folder, epoch=1).step()),
}


def _in_a_folder(do: Callable[[str], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        do(folder)


def _one_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1))
    weight.square().sum().backward()
    optimizer.step()


def _never_comes(step: str, folder: Path) -> str:
    torch.optim.SGD([torch.ones(1)], 0.1)  # imports half of torch
    hvd.barrier()
    if hvd.rank() == 1:
        if step == "plan":
            hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1))
        _looks_at_the_sky(10, folder)
        return ""
    with pytest.raises(HorovodInternalError, match="aborted after") as caught:
        STEPS[step]()
    (folder / str(hvd.rank())).touch()
    return str(caught.value)


# Parameters in buffers, an object of a process set, gradients, and one object for a checkpoint.
@pytest.mark.parametrize(
    "step", quick_ones(STEPS, "broadcast_parameters", "add_process_set", "plan", "allgather_object.checkpoint")
)
def test_a_rank_that_never_comes_to_a_step_is_named(step: str, tmp_path: Path) -> None:
    told = _on(3, _never_comes, step, tmp_path, stall_check_s=0.5, stall_shutdown_s=1.0)
    for message in (told[0], told[2]):
        assert step in message and "not by rank 1 (host" in message and "_looks_at_the_sky" in message


def _disagree_about_a_step() -> tuple[str, str]:
    calls: list[Callable[[], Any]] = [
        STEPS["broadcast_object"],
        STEPS["allgather_object"],
        lambda: hvd.broadcast_object(1, root_rank=1),
    ]
    found = []
    for at in (1, 2):
        with pytest.raises(HorovodInternalError) as caught:
            calls[at * hvd.rank()]()
        found.append(str(caught.value))
    assert hvd.broadcast_object(7) == 7  # goes on
    return found[0], found[1]


def test_ranks_that_call_different_steps_are_told() -> None:
    for steps, roots in _on(2, _disagree_about_a_step):
        assert "rank 0 (host" in steps and "has broadcast_object, rank 1 (host" in steps
        assert "disagree about the root rank" in roots


def _said() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdkit").addHandler(handler)
    return said


def _late_in_a_step() -> str:
    """Rank 1 does not come to the second step for a while, and the others wait in a bucket."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    named = [(f"layer{at}", weight) for at, weight in enumerate(weights)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 0.1), named)
    said = _said()
    for step in range(3):
        if step == 1 and hvd.rank() == 1:
            _looks_at_the_sky(2.5)
        optimizer.zero_grad()
        torch.cat(tuple(weights)).square().sum().backward()
        optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    return "".join(said)


@pytest.mark.parametrize(
    ("over", "progress"),
    [
        ("shared_memory", "inline"),
        pytest.param("mpi", "thread", marks=pytest.mark.slow),
        pytest.param("hierarchical_pairs", "thread", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_late_for_a_step_is_named(over: str, progress: str) -> None:
    told = _on(3, _late_in_a_step, over=over, progress=progress, stall_check_s=1.0)[0]
    assert told.count("has been waiting") in (1, 2)
    assert re.search(
        r"gradients of optimizer\.\d+ \(layer0, layer1, layer2 and 2 more\), reduction 1 has been waiting", told
    )
    assert "submitted by rank 0 (host" in told and "not by rank 1 (host" in told and "_looks_at_the_sky" in told


def _without_rank_one(body: Callable[..., str], *args: Any, over: str) -> list[str]:
    """What ranks 0 and 2 of three return; rank 1 may end as it likes."""
    try:
        results = dict(enumerate(run_ranks(3, body, *args, env={"HVDKIT_TRANSPORT": over}, timeout=50, grace=30)))
    except RanksFailedError as error:
        if not {0, 2} <= set(error.results):
            raise
        results = error.results
    return [results[0], results[2]]


def _never_steps(folder: Path) -> str:
    torch.optim.SGD([torch.ones(1)], 0.1)  # imports half of torch
    load_mpi().COMM_WORLD.Barrier()  # what a busy machine takes for that is no stall
    hvd.init(stall_check_s=0.5, stall_shutdown_s=2.0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("weight", weight)])
    try:
        for step in range(2):
            optimizer.zero_grad()
            if hvd.rank() == 1 and step == 1:
                _looks_at_the_sky(8, folder)
                return ""
            weight.square().sum().backward()
            optimizer.step()
    except HorovodInternalError as error:
        time.sleep(0.5)
        (folder / str(hvd.rank())).touch()
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("over", ["shared_memory", "mpi"])
def test_a_step_is_given_up_after_the_time_that_was_set(over: str, tmp_path: Path) -> None:
    for message in _without_rank_one(_never_steps, tmp_path, over=over):
        assert "gradients of optimizer.1 (weight), reduction 1" in message and "aborted after" in message
        assert "not by rank 1" in message


def _ends_early(step: str, folder: Path) -> str:
    hvd.init()
    if step == "gradients":
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1))
        weight.square().sum().backward()
        optimizer.step()
        STEPS[step] = lambda: _again(weight, optimizer)
    if hvd.rank() == 1:
        engine._at_exit()
        _looks_at_the_sky(6, folder)
        time.sleep(1)  # the others' last words are on their way
        return "ended"
    try:
        STEPS[step]()
    except HorovodInternalError as error:
        (folder / str(hvd.rank())).touch()
        return str(error)
    return "no error"


def _again(weight: torch.nn.Parameter, optimizer: Any) -> None:
    optimizer.zero_grad()
    weight.square().sum().backward()


@pytest.mark.parametrize(
    ("step", "over"),
    [
        pytest.param("broadcast_parameters", "mpi", marks=pytest.mark.slow),
        pytest.param("plan", "shared_memory", marks=pytest.mark.slow),
        ("gradients", "shared_memory"),
        pytest.param("gradients", "mpi", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_has_ended_is_an_error_at_once(step: str, over: str, tmp_path: Path) -> None:
    for message in _without_rank_one(_ends_early, step, tmp_path, over=over):
        assert "ank 1 " in message and "reached the end of its script" in message
