"""Complex parameters are trained as in one process; those whose gradients have no sum are refused when wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine.request import check_gradient

pytestmark = pytest.mark.ranks


class _Waves(torch.nn.Module):
    """Real numbers, complex ones (small, and large enough to be reduced in place), and one whose gradient is a
    conjugated view."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)

        def weights(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.1 * torch.randn(*shape, dtype=dtype, generator=random))

        self.real = weights(6, dtype=torch.float32)
        self.wide = weights(6, 3000, dtype=torch.complex64)
        self.long = weights(3000, dtype=torch.complex128)
        self.turned = weights(3000, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.real) @ self.wide * self.long * self.turned.conj()).abs().square().sum(1)


def _train(rank: int, size: int, *, wrapped: bool) -> list[torch.Tensor]:
    model = _Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.fp16)
    batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(2), dtype=torch.complex64)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch[rank::size]).mean().backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def _train_complex(transport: str) -> None:
    with joined(transport):
        alike = _train(0, 1, wrapped=False)
        for one, expected in zip(_train(hvd.rank(), hvd.size(), wrapped=True), alike, strict=True):
            # The real gradient crosses between simulated hosts in 16 bits; complex ones are sent as they are.
            tolerance = 1e-3 if transport.startswith("hierarchical") else 1e-5
            torch.testing.assert_close(one, expected, rtol=0, atol=tolerance)


@pytest.mark.native("Horovod adds no complex numbers")
@pytest.mark.parametrize("transport", ["auto", "mpi", "hierarchical_pairs"])
def test_complex_parameters_train_as_in_one_process(transport: str) -> None:
    run_ranks(3, _train_complex, transport)


def _refuse_float8() -> None:
    with joined():
        module = torch.nn.Module()
        module.scale = torch.nn.Parameter(torch.ones(3))
        module.weight = torch.nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        hvd.broadcast_parameters(module.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for op in (hvd.Average, hvd.Adasum):
            module.weight.requires_grad_(True)
            with pytest.raises(TypeError, match=r"the parameter weight is float8_e4m3fn.*bfloat16 or float32"):
                hvd.DistributedOptimizer(optimizer, module.named_parameters(), op=op)
        module.weight.requires_grad_(False)  # frozen, it is welcome
        optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters())
        module.scale.sum().backward()
        optimizer.step()
        module.weight.requires_grad_(True)
        with pytest.raises(TypeError, match="the parameter weight is float8_e4m3fn"):
            module.scale.sum().backward()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def test_float8_parameters_are_refused_before_anything_is_sent() -> None:
    run_ranks(2, _refuse_float8)


@pytest.mark.parametrize("options", [{"engine": "Horovod's core"}, {"adasum": True}], ids=str)
def test_complex_gradients_are_refused_by_what_cannot_add_them(options: dict[str, Any]) -> None:
    check_gradient("w", "complex64")
    check_gradient("w", "float32", **options)
    with pytest.raises(TypeError, match="w is complex64"):
        check_gradient("w", "complex64", **options)
