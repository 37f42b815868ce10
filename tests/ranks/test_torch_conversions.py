"""Parameters that are converted after the first step: another memory format changes no number, the rest is refused."""

from __future__ import annotations

import types
from typing import Any, cast

import pytest
import torch
from cases import product
from hvdrun_job import hvdrun
from ranks import run_ranks
from torch import nn
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.torch.conversions import PlannedMetadata

pytestmark = pytest.mark.native("Horovod's core has no sharded state and no such strategies")

_OPTIONS = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}
_EVERYWHERE = range(3)


def _wrap(model: nn.Module, name: str, form: str = "DistributedOptimizer", **arguments: Any) -> Any:
    plain = _plain(model, name)
    return getattr(hvd, form)(plain, model.named_parameters(), **arguments)


def _plain(model: nn.Module, name: str) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind(model.parameters(), **_OPTIONS[name])
    return made


def _make() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 5, 3), nn.Flatten(), nn.Linear(5 * 16, 3))
    model[2].bias.requires_grad_(False)
    return model.double()


def _step(model: Any, optimizer: Any, step: int, ranks: range) -> None:
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step)).double()
    mine = torch.cat([inputs[2 * rank : 2 * rank + 2] for rank in ranks])
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    optimizer.step()


def _last(model: Any) -> None:
    """Convert to channels last, and one square matrix to its transpose without any other memory."""
    cast(Any, model).to(memory_format=torch.channels_last)
    square = next(each for each in model.parameters() if each.dim() == 2)
    square.data = square.data.t().contiguous().t()


def _differences(name: str, shard: str | None, where: range) -> list[float]:
    """From one process, of parameters and of the state, with a conversion on some ranks between the steps."""
    with joined(check_replicas=1, fusion_bytes=512):
        model, alone = _make(), _make()
        optimizer, plain = _wrap(model, name, shard=shard), _plain(alone, name)
        found = []
        for step in range(5):
            if step == 3 and where == _EVERYWHERE:  # the parameters are divided anew
                model[2].bias.requires_grad_(True)
                alone[2].bias.requires_grad_(True)
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
            _step(alone, plain, step, range(hvd.size()))
            if step == 1 and hvd.rank() in where:
                optimizer.zero_grad()
                _last(model)
            if step in (1, 2, 4):
                found += _differences_of_states(optimizer.state_dict()["state"], plain.state_dict()["state"])
        return found + [
            float((one - two).detach().abs().max())
            for one, two in zip(model.parameters(), alone.parameters(), strict=True)
        ]


def _differences_of_states(state: dict[int, Any], expected: dict[int, Any]) -> list[float]:
    assert sorted(state) == sorted(expected)
    return [
        float((state[number][name] - value).abs().max())
        for number, entries in expected.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shard", "name", "where"),
    product(
        [None, "optimizer", "gradients"],
        list(_OPTIONS),
        [_EVERYWHERE, range(1, 2)],
        # Each pair of values, and of names and places both combinations.
        quick=lambda shard, name, where: ((name == "SGD") == (where == _EVERYWHERE)) != (shard == "optimizer"),
    ),
    ids=lambda value: {_EVERYWHERE: "everywhere", range(1, 2): "on one rank"}.get(value, str(value)),
)
def test_another_memory_format_changes_no_number(shard: str | None, name: str, where: range) -> None:
    for found in run_ranks(3, _differences, name, shard, where):
        assert max(found) < 1e-10


def _met(form: str, *, convert: bool) -> list[Any]:
    with joined():
        model = _make()
        optimizer = _wrap(model, "SGD", form, every=3)
        for step in range(7):
            if step == 4 and convert:
                _last(model)
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
        optimizer.synchronize_parameters()
        return [parameter.detach().tolist() for parameter in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["LocalSGD", "DiLoCo"])
def test_another_memory_format_changes_no_average_of_parameters(form: str) -> None:
    plain, converted = (run_ranks(3, _met, form, convert=convert) for convert in (False, True))
    for one, two in zip(plain[0], converted[2], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=0, atol=1e-6)


def _with_compression(arguments: dict[str, Any], when: int) -> list[float]:
    """From one process, of parameters; before step `when` ranks 0 and 2 convert the model, before step 0 all ranks."""
    with joined("hierarchical_uneven", check_replicas=1, fusion_bytes=512):
        model, alone = _make(), _make()
        optimizer, plain = _wrap(model, "SGD", compression=hvd.Compression.fp16, **arguments), _plain(alone, "SGD")
        for step in range(5):
            if step == when and (when == 0 or hvd.rank() != 1):
                optimizer.zero_grad()
                _last(model)
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
            _step(alone, plain, step, range(hvd.size()))
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return [float((one - two).detach().abs().max()) for one, two in pairs]


@pytest.mark.ranks
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_another_memory_format_changes_no_compressed_gradient(shard: str | None, when: int) -> None:
    for found in run_ranks(3, _with_compression, {"shard": shard}, when):
        assert 0 < max(found) < 1e-4  # of float16


def _adasum(compression: str, when: int) -> list[float]:
    """Parameters in the end; before step `when` ranks 0 and 2 convert the model, before step 0 all."""
    with joined():
        model = _make()
        optimizer = _wrap(model, "SGD", op=hvd.Adasum, compression=getattr(hvd.Compression, compression))
        for step in range(5):
            if step == when and (when == 0 or hvd.rank() != 1):
                _last(model)
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
        found: list[float] = torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()
        return found


@pytest.mark.ranks
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-10), ("fp16", 1e-4)])
def test_another_memory_format_changes_no_adasum(compression: str, tolerance: float, when: int) -> None:
    plain, converted = (torch.tensor(run_ranks(3, _adasum, compression, at)) for at in (-1, when))
    assert torch.equal(converted, converted[0].expand_as(converted))
    torch.testing.assert_close(converted, plain, rtol=0, atol=tolerance)


def _one_after_another(when: int) -> list[float]:
    """AsynchronousOptimizer, whose ranks step in turns, from a simulation of all ranks in one process."""
    with joined():
        model, all_of_them = _make(), [_make() for _ in range(3)]
        optimizer = _wrap(model, "SGD", "AsynchronousOptimizer", staleness=4, servers=2)
        plain = [_plain(one, "SGD") for one in all_of_them]
        served = [one.detach().clone() for one in model.parameters()]
        for step in range(4):
            if step == when and (when == 0 or hvd.rank() != 1):
                _last(model)
            if step == 0:
                optimizer.finish()  # all ranks agree on their parameters
            for turn in range(3):
                hvd.barrier()
                mine = range(turn, turn + 1)
                if hvd.rank() == turn:
                    _step(model, optimizer, step, mine)
                before = [one.detach().clone() for one in all_of_them[turn].parameters()]
                _step(all_of_them[turn], plain[turn], step, mine)
                for at, one in enumerate(all_of_them[turn].parameters()):
                    served[at] += (one.detach() - before[at]) / 3
                    one.data.copy_(served[at])
        found = list(all_of_them[hvd.rank()].parameters())
        differences = [float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), found, strict=True)]
        optimizer.finish()
        pairs = zip(model.parameters(), served, strict=True)
        return differences + [float((one - two).detach().abs().max()) for one, two in pairs]


@pytest.mark.ranks
@pytest.mark.parametrize("when", [0, 2])
def test_another_memory_format_changes_no_served_value(when: int) -> None:
    for found in run_ranks(3, _one_after_another, when):
        assert max(found) < 1e-10


def _without_the_last(when: int) -> list[float]:
    """BackupSteps whose rank 2 is always late, from one process with the batches of ranks 0 and 1."""
    with joined():
        model, alone = _make(), _make()
        optimizer, plain = _wrap(model, "SGD", "BackupSteps", drop=1), _plain(alone, "SGD")
        for step in range(5):
            if step == when and (when == 0 or hvd.rank() != 1):
                optimizer.zero_grad()
                _last(model)
            if step == 0:
                optimizer.finish()  # all ranks agree on their parameters
            if hvd.rank() == 2:
                hvd.barrier()
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
            if hvd.rank() != 2:
                hvd.barrier()
            _step(alone, plain, step, range(2))
        optimizer.finish()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return [float((one - two).detach().abs().max()) for one, two in pairs]


@pytest.mark.ranks
@pytest.mark.parametrize("when", [0, 2])
def test_another_memory_format_changes_no_average_of_the_first_gradients(when: int) -> None:
    for found in run_ranks(3, _without_the_last, when):
        assert max(found) < 1e-10


def _planned_in_two_formats(form: str, arguments: dict[str, Any]) -> None:
    """Rank 1 alone converts the model before the ranks agree on their parameters."""
    with joined():
        model = _make()
        optimizer = _wrap(model, "SGD", form, **arguments)
        if hvd.rank() == 1:
            _last(model)
        with pytest.raises(hvd.HorovodInternalError, match=r"(?s)0\.weight float64.* channels_last"):
            _step(model, optimizer, 0, range(hvd.rank(), hvd.rank() + 1))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("DistributedOptimizer", {"compression": hvd.Compression.fp16}),
        ("AsynchronousOptimizer", {"staleness": 2}),
        ("BackupSteps", {"drop": 1}),
    ],
    ids=["fp16", "AsynchronousOptimizer", "BackupSteps"],
)
def test_two_memory_formats_in_the_first_step_are_refused_by_name(form: str, arguments: dict[str, Any]) -> None:
    run_ranks(3, _planned_in_two_formats, form, arguments)


def _refused_state(form: str) -> None:
    """The shared values have an order that the parameters do not have any more when they are planned anew."""
    with joined():
        model = _make()
        optimizer = _wrap(model, "SGD", form, every=3)
        _step(model, optimizer, 0, range(hvd.rank(), hvd.rank() + 1))
        _last(model)
        model[2].bias.requires_grad_(True)
        with pytest.raises(ValueError, match=r"the shared values of 0.weight have the memory format 'contiguous'"):
            _step(model, optimizer, 1, range(hvd.rank(), hvd.rank() + 1))


@pytest.mark.ranks
@pytest.mark.slow
def test_values_in_another_order_are_refused() -> None:
    run_ranks(3, _refused_state, "LocalSGD")


def _refused(form: str, arguments: dict[str, Any]) -> None:
    with joined():
        mine = range(hvd.rank(), hvd.rank() + 1)
        model: Any = _make()
        optimizer = _wrap(model, "SGD", form, **arguments)
        _step(model, optimizer, 0, mine)
        optimizer.zero_grad()
        model[2].weight.data = model[2].weight.data.float()
        first = "The parameter 2.weight had the dtype torch.float64 .* and has the dtype torch.float32 now"
        with pytest.raises(ValueError, match=first):  # in backward(), or in step() where that works on gradients
            model[2].weight.sum().backward()
            optimizer.step()
        model[2].weight.data = model[2].weight.data.double()
        _step(model, optimizer, 1, mine)  # as it was
        optimizer.zero_grad()
        model[4].weight.data = model[4].weight.data[:2]
        model[4].bias.data = model[4].bias.data[:2]
        shapes = r"4\.(weight|bias) had the shape \(3,.* has the shape \(2,.* now"
        with pytest.raises(ValueError, match=shapes):
            _step(model, optimizer, 2, mine)
        hvd.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("DistributedOptimizer", {}),
        ("DistributedOptimizer", {"shard": "optimizer"}),
        ("DistributedOptimizer", {"shard": "gradients"}),
        ("DistributedOptimizer", {"op": hvd.Adasum}),
        ("LocalSGD", {"every": 2}),
        ("AsynchronousOptimizer", {"staleness": 2}),
        ("BackupSteps", {"drop": 1}),
    ],
    ids=str,
)
def test_another_dtype_or_shape_is_refused_by_name(form: str, arguments: dict[str, Any]) -> None:
    run_ranks(3, _refused, form, arguments)


def _planned_anew() -> float:
    """After a conversion a new optimizer goes on with the state of the old one."""
    with joined():
        model, alone = _make().float(), _make().float()
        optimizer, plain = _wrap(model, "SGD", shard="optimizer"), _plain(alone, "SGD")
        for step in range(4):
            if step == 2:
                state = optimizer.state_dict()
                model.double()
                alone.double()
                del optimizer
                optimizer = _wrap(model, "SGD", shard="optimizer")
                optimizer.load_state_dict(state)
                state, plain = plain.state_dict(), _plain(alone, "SGD")
                plain.load_state_dict(state)
            for one, other, ranks in ((model, optimizer, range(hvd.rank(), hvd.rank() + 1)), (alone, plain, range(3))):
                inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
                mine = torch.cat([inputs[2 * rank : 2 * rank + 2] for rank in ranks]).to(
                    cast(Any, model[0]).weight.dtype
                )
                other.zero_grad()
                one(mine).square().mean().backward()
                other.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return max(float((one - two).detach().abs().max()) for one, two in pairs)


@pytest.mark.ranks
def test_a_new_optimizer_plans_the_converted_model() -> None:
    assert max(run_ranks(3, _planned_anew)) < 1e-6


@pytest.mark.slow
def test_a_rank_that_converts_alone_ends_the_job_with_its_name() -> None:
    script = """
import torch, hvdkit.torch as hvd
hvd.init()
model = torch.nn.Linear(400, 400)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
for step in range(3):
    if step == 1 and hvd.rank() == 1:
        model.double()
    optimizer.zero_grad()
    model(torch.ones(2, 400, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()
"""
    ended = hvdrun(3, script)
    assert ended.returncode != 0
    assert b"had the dtype torch.float32" in ended.stdout + ended.stderr


def test_another_device_is_refused_where_one_is_no_cpu() -> None:
    parameter: Any = types.SimpleNamespace(dtype=1, shape=(2,), device=torch.device("cuda:0"))
    planned = PlannedMetadata([("layer", parameter)])
    planned.check()
    parameter.device = torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"layer had the device cuda:0 .* has the device cuda:1 now"):
        planned.check()
