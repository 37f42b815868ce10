"""The time of the host for a bucket in device memory: hvdkit's and DDP's, on the same process group of torch.

    hvdrun -np 2 python -m benchmarks.device_calls
    hvdrun -np 2 python -m benchmarks.device_calls --gloo

Without --gloo each rank uses torch's fake process group, whose operations do nothing, so that the rest is the host's
work: Python, torch's bindings, copies of gradients into buckets. With it the ranks reduce by Gloo, whose own time is in
every row. "a bucket" is the difference of a step with 64 buckets and one with a single bucket, divided by 63: the model
has 64 parameters of 16 numbers. On the fake group DDP has a communication hook in Python, because its own reduction
fails there. An accelerator's driver takes time of its own in each call, which is in none of the rows.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdkit
import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.engine import runtime
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import describe_machine, summarise
from hvdkit.torch.device import group as device_group
from hvdkit.torch.device.backend import make_backend
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.groups import DeviceSettings, open_group
from hvdkit.transport.buckets import BucketSpec

_BUCKETS, _NUMBERS = 64, 16
_CALL, _START = "the backend's allreduce and wait", "hvdkit's start and wait of a bucket"
_OURS, _DDP = "a bucket of hvdkit's optimizer", "a bucket of DDP"


class _Model(torch.nn.Module):
    """Parameters whose gradients are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.ones(_NUMBERS) for _ in range(_BUCKETS))

    def forward(self) -> torch.Tensor:
        """Sum all parameters."""
        return torch.stack([parameter.sum() for parameter in self.all]).sum()


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--gloo", action="store_true", help="reduce among the ranks, instead of by a group that does nothing"
    )
    parser.add_argument("--rounds", type=positive_int, default=15)
    parser.add_argument("--steps", type=positive_int, default=100, help="of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mock.patch.object(device_group, "make_backend", make_backend if options.gloo else _fake):
        hvd.init(device_transport="torch", fusion_bytes=1 << 20)
        if hvd.size() == 1:
            parser.error("one rank reduces nothing: start it with hvdrun -np 2")
        rows = _measure(options.rounds, options.steps, gloo=options.gloo)
        machine = describe_machine()
        where = (
            f"hvdkit {hvdkit.__version__}, torch {torch.__version__}, {machine['processor']}, {machine['cores']} cores"
        )
        how = f"{hvd.size()} ranks, {'Gloo' if options.gloo else 'fake process groups of torch'}"
        finish(rows, f"{where}, {how}", options.json, first=hvd.rank() == 0)
        hvd.shutdown()


def _fake(*_: object, **__: object) -> Any:
    kind: Any = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup
    return kind._create_internal(0, 2, kind.Options())


def _measure(rounds: int, steps: int, *, gloo: bool) -> list[Row]:
    group = open_group(runtime.runtime("A benchmark").transport, torch.device("cpu"), DeviceSettings("torch"))
    assert group is not None
    buckets = TorchBuckets(group, [BucketSpec("float32", _NUMBERS)])
    tensor, arguments = torch.ones(_NUMBERS), dist.AllreduceOptions()

    def call() -> None:
        group.backend.calls.allreduce([tensor], arguments).wait()

    def reduce() -> None:
        buckets.start(0)
        buckets.wait(0)

    _open_default_group(gloo=gloo)
    works: dict[str, tuple[Callable[[], None], Callable[[], None] | None]] = {
        _CALL: (call, None),
        _START: (reduce, None),
        _OURS: (_ours(many=True), _ours(many=False)),
        _DDP: (_ddp(many=True, hook=not gloo), _ddp(many=False, hook=not gloo)),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (many, one) in works.items():
            seconds = _time(many, steps)
            times[name].append(seconds if one is None else (seconds - _time(one, steps)) / (_BUCKETS - 1))
    dist.destroy_process_group()
    figures = summarise(times, _DDP)
    aim = {_OURS: "at most DDP's"}
    return [
        Row(
            "the host's time",
            name,
            each.median_s,
            each.ratio,
            _DDP,
            aim.get(name, ""),
            each.ratio <= 1.0 if name in aim and each.ratio is not None else None,
        )
        for name, each in figures.items()
    ]


def _open_default_group(*, gloo: bool) -> None:
    if gloo:
        distributed: Any = dist
        store = distributed.TCPStore("127.0.0.1", 29555, hvd.size(), hvd.rank() == 0, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def _ours(*, many: bool) -> Callable[[], None]:
    model = _Model()
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    current = runtime.runtime("A benchmark")
    size = 4 * _NUMBERS if many else 1 << 20
    object.__setattr__(current.config, "fusion_bytes", size)
    named = [(f"{many}.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(plain, named)

    def step() -> None:
        model().backward()
        optimizer.synchronize()
        optimizer.zero_grad(set_to_none=False)

    step()
    return step


def _ddp(*, many: bool, hook: bool) -> Callable[[], None]:
    model = _Model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-6 if many else 25.0, gradient_as_bucket_view=True)
    if hook:
        wrapped.register_comm_hook(None, _reduce)

    def step() -> None:
        wrapped().backward()
        for parameter in model.all:
            assert parameter.grad is not None
            parameter.grad.zero_()

    step()
    return step


def _reduce(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer().div_(2)
    dist.all_reduce(tensor, async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


# torch reads them as types, not as texts.
_reduce.__annotations__.update(bucket=vars(dist)["GradBucket"], **{"return": torch.futures.Future[torch.Tensor]})


def _time(step: Callable[[], None], count: int) -> float:
    """Seconds a call."""
    step()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
