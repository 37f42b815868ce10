"""Gradients that are coded between hosts: models learn as well as without, and less goes over the network."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from sklearn.datasets import load_digits
from torch_world import joined

import hvdkit.torch as hvd

pytestmark = pytest.mark.native("Horovod's core sends numbers as they are or as float16")

TopK, PowerSGD, Sign = hvd.Compression.TopK, hvd.Compression.PowerSGD, hvd.Compression.Sign


class Learned(NamedTuple):
    """right: part of held-out digits. loss: of those learned from. sent: bytes a step to the network by this rank."""

    right: float
    loss: float
    sent: int
    parameters: bytes


def learn_digits(transport: str, compression: Any, steps: int, infinite_at: int = -1) -> Learned:
    """Learn to read digits.

    infinite_at: a step in which rank 0's gradients are not finite; it is skipped, as GradScaler does.
    """
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    with joined(transport):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.3), model.named_parameters(), compression
        )
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randperm(1400, generator=generator)[: 32 * hvd.size()][hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            (loss * float("inf") if step == infinite_at and hvd.rank() == 0 else loss).backward()
            optimizer.synchronize()
            finite = all(one.grad is not None and bool(one.grad.isfinite().all()) for one in model.parameters())
            assert finite == (step != infinite_at), f"step {step} is {'' if finite else 'not '}finite"
            if finite:
                with optimizer.skip_synchronize():
                    optimizer.step()
        right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
        final = torch.nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).item()
        sent = optimizer.reduction_statistics().sent_bytes // steps
        return Learned(right, final, sent, b"".join(one.detach().numpy().tobytes() for one in model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.slow), "hierarchical_uneven"])
def test_a_coded_model_learns_as_well_on_every_rank_alike(transport: str) -> None:
    plain = run_ranks(3, learn_digits, transport, hvd.Compression.none, 250)[0]
    assert plain.right > 0.88
    for coding, part, loss in ((TopK(0.05), 0.12, 1.1), (PowerSGD(2), 0.12, 1.05), (Sign(), 0.06, 1.1)):
        results = run_ranks(3, learn_digits, transport, coding, 250)
        assert len({one.parameters for one in results}) == 1, f"{coding}: the ranks' parameters differ"
        found = results[0]
        assert found.right > plain.right - 0.03, f"{coding}: {found.right} are right, {plain.right} without"
        assert found.loss < loss * plain.loss, f"{coding}: the loss is {found.loss}, {plain.loss} without"
        assert found.sent < part * plain.sent, f"{coding}: {found.sent} bytes a step, {plain.sent} without"


@pytest.mark.parametrize(
    "coding",
    [TopK(0.05), PowerSGD(4), Sign()],
    ids=str,
)
@pytest.mark.slow
def test_a_coded_model_learns_as_well_after_an_infinite_step(coding: Any) -> None:
    plain = run_ranks(3, learn_digits, "hierarchical_uneven", hvd.Compression.none, 150)[0]
    results = run_ranks(3, learn_digits, "hierarchical_uneven", coding, 150, 10)
    assert len({one.parameters for one in results}) == 1
    assert results[0].right > plain.right - 0.03, f"{results[0].right} of the digits are right, {plain.right} without"


def test_each_parameter_has_the_first_rule_that_fits() -> None:
    policy = {"2.*": hvd.Compression.fp16, "*.weight": TopK(0.01), "*": hvd.Compression.none}
    sent = run_ranks(2, learn_digits, "mpi", policy, 2)[0].sent
    coded, half, plain = 8 * round(0.01 * 64 * 96), 2 * (96 * 10 + 10), 4 * 96
    assert coded + half + plain <= sent < coded + half + plain + 200  # tensors begin at cache lines


@pytest.mark.parametrize(
    ("compression", "kind", "words"),
    [
        (TopK, TypeError, r"is the class TopK; pass an object of it, for example hvd.Compression.TopK\(ratio=0.01\)"),
        ({"0.*": TopK(0.1)}, ValueError, r"no pattern for '2.weight'; its patterns are '0.\*'. Add '\*'"),
        (
            {"*": 3},
            TypeError,
            r"compression=3 is not supported; use hvd.Compression.none, .*hvd.Compression.TopK\(ratio=0.01\)",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_can(compression: Any, kind: type[Exception], words: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with joined("single"), pytest.raises(kind, match=words):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), compression)


def test_a_single_allreduce_has_no_memory_for_a_coding() -> None:
    with joined("single"), pytest.raises(TypeError, match="is for the gradients of an optimizer"):
        hvd.allreduce(torch.ones(3), compression=TopK(0.1))  # type: ignore[arg-type]


def test_a_coding_of_nothing_is_no_coding() -> None:
    for make in (lambda: TopK(0.0), lambda: TopK(1.5), lambda: PowerSGD(0)):
        with pytest.raises(ValueError, match=r"above 0|1 or more"):
            make()
