"""The order of the work on the streams of an accelerator, and that the host never waits for them in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, FakeModule, FakeStream, Trace, fake_accelerator
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd

pytestmark = [pytest.mark.ranks, pytest.mark.native("device memory is reduced by hvdkit's own engine")]


@contextmanager
def _world(**settings: Any) -> Iterator[FakeModule]:
    with fake_accelerator() as module, joined(**settings):
        hvd.allreduce(torch.ones(1, device=DEVICE))  # connects, and makes the engine's stream
        module.trace.clear()
        yield module
        module.ended = True


def _numbered(trace: Trace) -> Trace:
    """The trace with the numbers of operations and events from 0."""
    numbers: dict[tuple[bool, int], int] = {}
    result: Trace = []
    for call, stream, number, *rest in trace:
        if call in ("used", "allocate", "gradient"):
            result.append((call, stream, number))
            continue
        key = call in ("record", "wait"), number
        result.append((call, stream, numbers.setdefault(key, sum(kind == key[0] for kind, _ in numbers)), *rest))
    return result


def _named(how: str) -> Trace:
    with _world() as module:
        x = torch.ones(3, device=DEVICE)
        if how == "allreduce":
            hvd.allreduce(x)
        elif how == "asynchronous":
            handle = hvd.allreduce_async(x, op=hvd.Sum)
            side = FakeStream(module.trace, "side")
            with module.stream(side):
                hvd.synchronize(handle)
        elif how == "allgather":
            hvd.allgather(x)
        else:
            hvd.alltoall(x)
        return _numbered(module.trace)


BEHIND_THE_CALLER = [("record", "default", 0), ("wait", "engine 0", 0)]
#: The operation, an event behind it, and the caller's stream behind that.
ORDER: dict[str, Trace] = {
    "allreduce": [("begin", "engine 0", 0, "allreduce")],
    "asynchronous": [("begin", "engine 0", 0, "allreduce")],
    "allgather": [("allocate", "engine 0", 9), ("begin", "engine 0", 0, "_allgather_base")],
    "alltoall": [("allocate", "engine 0", 3), ("begin", "engine 0", 0, "alltoall_base")],
}


@pytest.mark.parametrize("how", ORDER)
def test_an_operation_runs_between_the_callers_work_before_and_after_it(how: str) -> None:
    caller = "side" if how == "asynchronous" else "default"
    results = [("used", caller, count) for call, _, count, *_ in ORDER[how] if call == "allocate"]
    expected = [
        *BEHIND_THE_CALLER,
        *ORDER[how],
        ("join", "engine 0", 0),
        ("record", "engine 0", 1),
        ("wait", caller, 1),
        ("used", caller, 3),
        *results,
    ]
    assert run_ranks(3, _named, how) == [expected] * 3


def _train(shard: str | None) -> list[Trace]:
    """The traces of two steps: on one stream, and with the gradient of the last layer on another."""
    with _world(fusion_bytes=64) as module:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)).to(DEVICE)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), shard=shard
        )
        streams: list[FakeStream | None] = [None, None]

        def compute(layer: int) -> None:
            module.use(streams[layer])
            module.note("gradient", layer)

        for layer, weight in enumerate(model.parameters()):
            weight.register_hook(lambda _, layer=layer: compute(layer))
        steps = []
        for step in range(4):
            module.trace.clear()
            optimizer.zero_grad()
            if step == 3:
                streams[1] = FakeStream(module.trace, "side")
            model(torch.ones(2, 4, device=DEVICE)).sum().backward()
            optimizer.step()
            steps.append(_numbered(module.trace))
        return steps[2:]


@pytest.mark.parametrize("shard", [None, pytest.param("optimizer", marks=pytest.mark.slow), "gradients"])
def test_buckets_follow_the_backward_pass_on_its_streams_without_a_wait_of_the_host(shard: str | None) -> None:
    """Each is begun before the next gradient is computed, on its stream, and joined in step()."""
    reduce, released = ("_reduce_scatter_base", 1) if shard == "gradients" else ("allreduce", 0)
    last: list[Trace] = [
        [("gradient", stream, 1), *[("used", stream, 16)] * released, ("begin", stream, 0, reduce)]
        for stream in ("default", "side")
    ]
    between = [("record", "side", 0), ("wait", "default", 0)]
    first: Trace = [*[("used", "default", 16)] * released, ("begin", "default", 1, reduce)]
    joined: Trace = [("join", "default", 0), ("join", "default", 1)]
    if shard:
        joined += [("begin", "default", number, "_allgather_base") for number in (2, 3)]
        joined += [("join", "default", number) for number in (2, 3)]
    expected = [
        [*last[0], ("gradient", "default", 0), *first, *joined],
        [*last[1], ("gradient", "default", 0), *between, *first, *joined],
    ]
    assert run_ranks(3, _train, shard) == [expected] * 3
