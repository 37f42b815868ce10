"""Sums in the order of the ranks, device_sums=float32: by Gloo on the CPU, with the code for accelerators."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import phase_checks
import pytest
import torch
from bucket_checks import BUCKET_CHECKS
from device_world import TORCH
from group_transport import GroupTransport
from numpy.typing import NDArray
from phase_checks import PHASE_CHECKS
from ranks import RanksFailedError, run_ranks
from test_device_gradients import fail_in_begin
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine import runtime
from hvdkit.errors import PlanMismatchError, RankLostError, TransportError
from hvdkit.torch.device.backend import Backend
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.calls import Call
from hvdkit.torch.device.group import TorchGroup
from hvdkit.torch.device.groups import DeviceSettings, open_group
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import BucketSpec

pytestmark = [pytest.mark.ranks, pytest.mark.native("device memory is reduced by hvdkit's own engine")]

FLOAT32 = {**TORCH, "device_sums": "float32"}
#: Sizes of parameters, in several buckets of these bytes; most are no multiple of the number of ranks.
SIZES, FUSION_BYTES = (1, 700, 5, 1024, 64, 333), 1024
STEPS = 3
Numbers = NDArray[np.float64]


def gradients(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers whose sum depends on the order, because large ones cancel, and on where it is rounded to 16 bits."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (step, 100 * (step + 1) + rank))
    large = [20_000 * (1, 0, -1)[rank] * torch.randn(size, generator=common).clamp(-2, 2) for size in SIZES]
    small = [torch.randn(size, generator=own) for size in SIZES]
    cancel = [torch.rand(size, generator=common) < 0.5 for size in SIZES]
    return [
        torch.where(some, one + 0.01 * other, other).to(dtype)
        for some, one, other in zip(cancel, large, small, strict=True)
    ]


def expected(trained: Sequence[Sequence[int]], size: int, dtype: str, wire: str = "") -> list[Numbers]:
    """The parameters after steps of SGD. trained: the ranks with gradients in each step; size: how many are averaged.

    Computed in this process: sums of float32, or of float64 numbers, by rank, and rounded once.
    """
    own, sent = getattr(torch, dtype), getattr(torch, wire or dtype)
    weights = [torch.zeros(count, dtype=own) for count in SIZES]
    for number, ranks in enumerate(trained):
        for at, weight in enumerate(weights):
            total = np.zeros(SIZES[at], np.float64 if sent is torch.float64 else np.float32)
            for rank in range(size):
                if rank in ranks:
                    total = total + gradients(rank, number, own)[at].to(sent).to(torch.from_numpy(total).dtype).numpy()
            average = torch.from_numpy(np.multiply(total, 1 / size, dtype=total.dtype))
            weight.sub_(average.to(sent).to(own))
    return [weight.double().numpy() for weight in weights]


def make(dtype: str, name: str = "", **options: Any) -> tuple[torch.nn.ParameterList, Any]:
    model = torch.nn.ParameterList(torch.zeros(size, dtype=getattr(torch, dtype)) for size in SIZES)
    named = [(name + each, parameter) for each, parameter in model.named_parameters()]
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named, **options)


def step(model: torch.nn.ParameterList, optimizer: Any, number: int, rank: int) -> None:
    """A step of SGD with the gradients of `rank`."""
    given = gradients(rank, number, model[0].dtype)
    optimizer.zero_grad()
    time.sleep(0.01 * rank)  # ranks are at different buckets
    torch.stack([(one * other).sum() for one, other in zip(model, given, strict=True)]).sum().backward()
    optimizer.step()


def train(dtype: str, rank: int, **options: Any) -> list[Numbers]:
    """Steps of SGD from zeros."""
    model, optimizer = make(dtype, **options)
    for number in range(STEPS):
        step(model, optimizer, number, rank)
    return numbers(model)


def numbers(model: torch.nn.ParameterList) -> list[Numbers]:
    return [one.detach().double().numpy().copy() for one in model]


def body(dtype: str, sums: str = "float32", compression: str = "none", **options: Any) -> list[Numbers]:
    with joined(**TORCH, device_sums=sums, fusion_bytes=FUSION_BYTES):
        return train(dtype, hvd.rank(), compression=getattr(hvd.Compression, compression), **options)


def same_bits(results: Sequence[Sequence[Numbers]], reference: Sequence[Numbers]) -> bool:
    return all(
        np.array_equal(one, other) and np.array_equal(np.signbit(one), np.signbit(other))
        for result in results
        for one, other in zip(result, reference, strict=True)
    )


SLOW = pytest.mark.slow
CASES = [
    ("bfloat16", "none", {}),
    ("float16", "none", {"shard": "gradients"}),
    pytest.param("float16", "none", {}, marks=SLOW),
    pytest.param("bfloat16", "none", {"shard": "gradients"}, marks=SLOW),
    pytest.param("bfloat16", "none", {"shard": "optimizer"}, marks=SLOW),
    pytest.param("float32", "none", {}, marks=SLOW),
    pytest.param("float64", "none", {"shard": "gradients"}, marks=SLOW),
    pytest.param("float32", "fp16", {}, marks=SLOW),
    ("float32", "bf16", {}),
]


@pytest.mark.parametrize("dtype, compression, options", CASES)
def test_sums_are_those_of_one_process_by_rank(dtype: str, compression: str, options: dict[str, Any]) -> None:
    results = run_ranks(3, body, dtype, "float32", compression, **options)
    wire = {"none": "", "fp16": "float16", "bf16": "bfloat16"}[compression]
    assert same_bits(results, expected([range(3)] * STEPS, 3, dtype, wire))


def test_the_library_gives_other_bits() -> None:
    results = run_ranks(3, body, "bfloat16", "library")
    assert not same_bits(results, expected([range(3)] * STEPS, 3, "bfloat16"))


def in_sets() -> list[Numbers]:
    """Ranks 0 and 2 train together, rank 1 by itself."""
    with joined(**FLOAT32, fusion_bytes=FUSION_BYTES):
        mine = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1])][hvd.rank() % 2]
        return train("bfloat16", mine.rank(), process_set=mine)


@pytest.mark.slow
def test_process_sets_add_their_own_ranks() -> None:
    first, alone, third = run_ranks(3, in_sets)
    assert same_bits([first, third], expected([range(2)] * STEPS, 2, "bfloat16"))
    assert same_bits([alone], expected([[0]] * STEPS, 1, "bfloat16"))


def join() -> list[list[Numbers]]:
    """Two optimizers, in turn; rank 1 joins after one step of each, and begins their next steps in advance."""
    with joined(**FLOAT32, fusion_bytes=FUSION_BYTES):
        pairs = [make("bfloat16", f"{number}.") for number in range(2)]
        for number in range(1 if hvd.rank() == 1 else STEPS):
            for model, optimizer in pairs:
                step(model, optimizer, number, hvd.rank())
        hvd.join()
        return [numbers(model) for model, _ in pairs]


def test_a_joined_rank_counts_as_zeros() -> None:
    reference = expected([range(3)] + [[0, 2]] * (STEPS - 1), 3, "bfloat16")
    first, _, third = run_ranks(3, join)
    assert same_bits([*first, *third], reference)


def disagree() -> str:
    with joined():
        mine = "float32" if hvd.rank() == 1 else "library"
    with joined(**TORCH, device_sums=mine):
        model, optimizer = make("bfloat16")
        with pytest.raises(PlanMismatchError) as error:
            step(model, optimizer, 0, hvd.rank())
    return str(error.value)


def test_ranks_with_different_settings_are_refused_with_both_names() -> None:
    for message in run_ranks(3, disagree):
        assert "settings: ranks 0, 2 has" in message and "device_sums=library; rank 1 has" in message
        assert "device_sums=float32" in message


#: A group's operations that other code begins among those of buckets are not in their order; the rest are for the host.
LEFT_OUT = {
    "buckets_plans_and_collectives_side_by_side",
    "buckets_narrow_wires_are_near",
    "buckets_numbers_too_large_for_the_wire_are_clamped",
    "buckets_coded_sums_arrive_in_time",
    "buckets_a_round_that_is_not_finite_leaves_no_trace",
    "buckets_codings_send_less",
    "buckets_matrices_of_low_rank_are_sent_whole",
}
CHECKS = {name: check for name, check in {**BUCKET_CHECKS, **PHASE_CHECKS}.items() if name not in LEFT_OUT}
QUICK = {"buckets_halves_are_summed_in_float32", "phases_phases_and_allreduces_in_one_plan"}


def check(transport: Transport, names: list[str]) -> None:
    group = GroupTransport(transport, "float32")
    # With a wire dtype some buckets would be of another plan. On the CPU two plans must not be waited for in an order
    # that depends on the rank, because each makes progress in its own waits.
    with mock.patch.object(phase_checks, "WIRES", ("none", "none")):
        for name in names:
            CHECKS[name](group)
    group.close()


@pytest.mark.parametrize("names", [sorted(QUICK), pytest.param(sorted(CHECKS.keys() - QUICK), marks=SLOW)])
def test_buckets_pass_the_checks_of_every_transport(names: list[str]) -> None:
    run_ranks(3, check, names, transport="shared_memory")


def in_order() -> list[str]:
    """The operations of a group, as this rank begins them: it waits for its buckets in an order of its own."""
    begun: list[str] = []

    def begin(group: TorchGroup, call: Call) -> Any:
        begun.append(call.name)
        return plain(group, call)

    plain = TorchGroup.begin
    with joined(**TORCH), mock.patch.object(TorchGroup, "begin", begin):
        transport, cpu = runtime.runtime("the test").transport, torch.device("cpu")
        group = open_group(transport, cpu, DeviceSettings("torch"), "the test")
        assert group is not None
        specs = [BucketSpec("bfloat16", count) for count in (5_000, 1, 70_000, 300)]
        plans = [TorchBuckets(group, specs, "float32") for _ in range(2)]
        dice = random.Random(hvd.rank())
        for number in range(20):
            started = []
            for at, plan in [(at, plan) for at in range(4) for plan in plans]:
                (plan.reduce_scatter if number % 5 == 4 else plan.start)(at)
                started.append((at, plan))
                dice.shuffle(started)
                for _ in range(dice.randrange(3)):
                    if started and dice.random() < 0.5:
                        started[-1][1].wait(started.pop()[0])
                    else:
                        plan.advance()
            for at, plan in started:
                plan.wait(at)
        for plan in plans:
            plan.close()
    return begun


def test_all_ranks_begin_the_operations_in_one_order() -> None:
    first, second, third = run_ranks(3, in_order)
    both = ["an alltoall", "an allgather"] * 8
    assert first == second == third == (both * 4 + ["an alltoall"] * 8) * 4


class Device:
    """An accelerator and its group, rank 0 of 2, whose calls are recorded with the current stream.

    The all-to-all gives this rank's own numbers; a question whether an operation has ended is an error.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        self.rank, self.size, self.order = 0, 2, None
        self.on_host, self.accelerator, self.streams = False, self, self
        self.backend = Backend("nccl", mock.Mock())

    def current_stream(self) -> str:
        return self.now

    def make_stream(self, *, high_priority: bool) -> str:
        assert high_priority
        return "own"

    @contextlib.contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def record_event(self) -> str:
        return f"event of {self.now}"

    def wait(self, stream: str, event: str) -> None:
        self.log.append(f"{stream} waits for {event}")

    def allocate(self, count: int, dtype: str) -> TensorBuffer:
        return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype]), dtype)

    def begin(self, call: Call) -> Any:
        self.log.append(f"begin {call.name} on {self.now}")
        if call.name == "an alltoall":
            received, sent = call.arguments[:2]
            received.copy_(sent)
        else:
            self.log.append(f"of {call.arguments[1].view(torch.bfloat16).tolist()}")
        return mock.Mock(spec=["wait"])

    def join(self, work: Any, _: Any = None) -> None:
        self.log.append(f"join on {self.now}")
        work.wait()


def test_on_an_accelerator_streams_wait_and_the_host_does_not() -> None:
    device: Any = Device()
    buckets = TorchBuckets(device, [BucketSpec("bfloat16", 3), BucketSpec("float32", 1)], "float32")
    for at in range(2):
        buckets.memory[at].array[:] = 1.5
    buckets.start(0)
    buckets.reduce_scatter(1)
    begun = [
        "own waits for event of main",
        "begin an alltoall on own",
        "join on own",
    ]
    assert device.log == [*begun, "begin an allgather on own", "of [3.0, 1.5]", *begun]  # the fourth number is padding
    del device.log[:]
    buckets.wait(0)
    buckets.wait(1)
    # buckets.wait() is by TorchGroup.join(), which here joins the exchange and then its last operation.
    assert device.log == ["join on main", "join on main", "join on main", "main waits for event of own"]
    assert buckets.memory[1].array.tolist() == [1.5]


def the_second_operation_fails() -> list[str]:
    """What steps raise in which, and after which, the backend fails in the all-gather of the first bucket."""
    said = []
    with joined(**FLOAT32, fusion_bytes=FUSION_BYTES):
        model, optimizer = make("bfloat16")
        step(model, optimizer, 0, hvd.rank())
        with fail_in_begin(1, range(3)):
            for number in (1, 2):
                with pytest.raises(TransportError) as failed:
                    step(model, optimizer, number, hvd.rank())
                said.append(str(failed.value))
    return said


def test_a_failure_of_the_second_operation_is_raised_by_this_step_and_later_ones() -> None:
    for said in run_ranks(3, the_second_operation_fails, fresh=True):
        assert "GLOO failed in an allgather of optimizer" in said[0] and said[0] == said[1], said


def a_rank_dies() -> None:
    """The last rank is killed in a backward pass, when some of its buckets have started."""
    with joined(**FLOAT32, fusion_bytes=FUSION_BYTES):
        model, optimizer = make("bfloat16")
        step(model, optimizer, 0, hvd.rank())
        if hvd.rank() == 2:
            model[1].register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RankLostError) as lost:
            for number in itertools.count(1):
                step(model, optimizer, number, hvd.rank())
        raise RuntimeError(f"lost: {lost.value}")


@pytest.mark.slow
def test_a_killed_rank_ends_the_wait_of_the_others() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, a_rank_dies, fresh=True)
    for rank in (0, 1):
        text = failed.value.tracebacks[rank]
        assert re.search(r"lost: Rank 2 .*GLOO on rank \d on .*, CPU were ended", text), text
