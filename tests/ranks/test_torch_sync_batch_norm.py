"""SyncBatchNorm on ranks equals torch's BatchNorm in one process with the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import product
from numpy.typing import NDArray
from ranks import run_ranks
from torch import nn
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.torch.sync_batch_norm import SyncBatchNorm

Values = dict[str, NDArray[np.float64]]

#: Samples of each rank, for batches that follow each other.
UNEVEN = {2: [[3, 4], [1, 6], [0, 5]], 3: [[2, 2, 2], [1, 0, 7], [4, 1, 3]]}


def model(momentum: float | None, affine: bool, tracked: bool, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    options: dict[str, Any] = {"momentum": momentum, "affine": affine, "track_running_stats": tracked}
    made = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6, **options), nn.Tanh(), nn.Flatten(), nn.Linear(54, 5), nn.BatchNorm1d(5)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made.to(dtype)


def batch(step: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = 3 + 2 * torch.randn(rows, 2, 5, 5, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(rows, 5, generator=generator, dtype=torch.float64).to(dtype)


def train(net: nn.Module, splits: list[list[int]], mine: int | None, dtype: torch.dtype) -> Values:
    """Outputs, gradients and statistics of some batches. mine: whose rows of them; None is all."""
    found: Values = {}
    for step, counts in enumerate(splits):
        inputs, targets = batch(step, sum(counts), dtype)
        first = sum(counts[:mine]) if mine is not None else 0
        last = first + (counts[mine] if mine is not None else sum(counts))
        part = inputs[first:last].clone().requires_grad_()
        net.zero_grad()
        outputs = net(part)
        (outputs * targets[first:last]).sum().backward()
        assert part.grad is not None
        found[f"{step} outputs"] = outputs.detach().double().numpy()
        found[f"{step} inputs' gradient"] = part.grad.double().numpy()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            found[f"{step} {name}'s gradient"] = parameter.grad.double().numpy().copy()
        for name, buffer in net.named_buffers():
            found[f"{step} {name}"] = buffer.double().numpy().copy()
    net.eval()
    with torch.no_grad():
        found["evaluated"] = net(batch(99, 4, dtype)[0]).double().numpy()
    return found


def train_on_rank(splits: list[list[int]], options: tuple[Any, ...]) -> Values:
    with joined():
        net = SyncBatchNorm.convert_sync_batchnorm(model(*options))
        return train(net, splits, hvd.rank(), options[-1])


def assert_equal_to_one_process(size: int, options: tuple[Any, ...], tolerance: float) -> None:
    torch.set_num_threads(1)
    splits = UNEVEN[size]
    expected = train(model(*options), splits, None, options[-1])
    results = run_ranks(size, train_on_rank, splits, options)
    for name, values in expected.items():
        if name.endswith(("outputs", "inputs' gradient")):
            got = np.concatenate([result[name] for result in results])
        elif name.endswith("'s gradient"):
            got = sum(result[name] for result in results)
        else:
            got = results[0][name]
            for result in results[1:]:
                np.testing.assert_array_equal(result[name], got, err_msg=name)
        scale = max(1.0, np.abs(values).max(initial=0))
        np.testing.assert_allclose(got / scale, values / scale, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("momentum", "affine"), product([0.1, None], [True, False], quick=lambda momentum, affine: affine == bool(momentum))
)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_equal_one_process_with_the_whole_batch(size: int, momentum: float | None, affine: bool) -> None:
    assert_equal_to_one_process(size, (momentum, affine, True, torch.float64), 1e-10)


@pytest.mark.ranks
def test_float32_is_as_good_as_torchs() -> None:
    assert_equal_to_one_process(3, (0.1, True, True, torch.float32), 2e-5)


def without_statistics() -> tuple[bool, torch.Tensor]:
    with joined():
        layer = SyncBatchNorm(2, track_running_stats=False).double().eval()
        assert layer.running_mean is None
        rows = batch(0, 7, torch.float64)[0]
        return True, layer(rows[:2] if hvd.rank() == 0 else rows[2:]).detach()


@pytest.mark.ranks
def test_without_running_statistics_evaluation_uses_all_ranks_samples() -> None:
    results = run_ranks(2, without_statistics)
    expected = nn.BatchNorm2d(2, track_running_stats=False).double()(batch(0, 7, torch.float64)[0])
    torch.testing.assert_close(torch.cat([result[1] for result in results]), expected, rtol=0, atol=1e-12)


def far_from_zero(dtype: torch.dtype) -> torch.Tensor:
    with joined():
        rows = 1000 + torch.linspace(-1, 1, 64, dtype=torch.float64).view(32, 2)
        outputs: torch.Tensor = SyncBatchNorm(2)(rows.to(dtype)[hvd.rank() :: 2])
        assert outputs.dtype == dtype
        return outputs.detach().double()


@pytest.mark.ranks
def test_values_far_from_zero_keep_their_variance() -> None:
    for outputs in run_ranks(2, far_from_zero, torch.float32):
        assert abs(outputs.std().item() - 1) < 0.05


@pytest.mark.ranks
def test_narrow_inputs_stay_narrow() -> None:
    run_ranks(2, far_from_zero, torch.bfloat16)


def too_little(rows: list[int]) -> str:
    with joined():
        layer = SyncBatchNorm(3)
        with pytest.raises(ValueError, match="more than one value") as caught:
            layer(torch.ones(rows[hvd.rank()], 3))
        assert layer.num_batches_tracked == 0
        with pytest.raises(ValueError, match="2 or more dimensions"):
            layer(torch.ones(3))
        return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [[1, 0], [0, 0]])
def test_too_little_for_a_variance_is_an_error_on_every_rank(rows: list[int]) -> None:
    for rank, message in enumerate(run_ranks(2, too_little, rows)):
        assert f"All ranks together have {sum(rows)}; the input of this rank has shape ({rows[rank]}, 3)" in message


def test_converting_keeps_parameters_statistics_and_mode() -> None:
    net = model(0.3, True, True, torch.float64)
    net[1].eval()
    parameters, state = list(net.parameters()), {name: one.clone() for name, one in net.state_dict().items()}
    converted = SyncBatchNorm.convert_sync_batchnorm(net)
    kinds = [type(layer) for layer in converted.children()]
    assert kinds.count(SyncBatchNorm) == 2 and nn.BatchNorm2d not in kinds
    assert all(one is other for one, other in zip(parameters, converted.parameters(), strict=True))
    for name, value in converted.state_dict().items():
        torch.testing.assert_close(value, state[name])
    layer = converted.get_submodule("1")
    assert isinstance(layer, SyncBatchNorm)
    assert (layer.momentum, layer.num_features, layer.training) == (0.3, 6, False)
    assert SyncBatchNorm.convert_sync_batchnorm(converted) is converted


def test_a_lazy_layer_is_not_converted_before_its_first_batch() -> None:
    with pytest.raises(ValueError, match="does not know its number of channels"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.native("a transport of its own")
def test_one_rank_is_plain_batch_normalization() -> None:
    hvd.init(transport="single")
    try:
        rows = batch(0, 7, torch.float64)[0]
        torch.testing.assert_close(SyncBatchNorm(2).double()(rows), nn.BatchNorm2d(2).double()(rows))
    finally:
        hvd.shutdown()
