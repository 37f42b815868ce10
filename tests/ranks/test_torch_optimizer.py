"""Trained on several ranks, a model is what one process with the whole batch would have made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import product, quick_ones
from ranks import run_ranks
from torch_world import Case, assert_alike, train_here, train_on_ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Muon": {"lr": 0.002},
}
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
# What 16 bits on the wire may cost in 20 steps: of an update, 2^-11 and 2^-8.
NO_BF16 = pytest.param("bf16", marks=pytest.mark.native("Horovod adds no bfloat16"))
WIRE_TOLERANCES = {"fp16": 2e-3, "bf16": 2e-2}


def _case(name: str, **more: Any) -> Case:
    return Case(name, more.pop("options", OPTIMIZERS[name]), bias=name != "Muon", **more)


def _check(case: Case, size: int, tolerance: float, transport: str = "auto", **more: Any) -> None:
    settings = more.pop("settings", {})
    results = run_ranks(size, train_on_ranks, case, transport, settings, **more)
    assert_alike(results, train_here(case, size), tolerance)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "dtype"),
    # Each optimizer and each dtype.
    product(OPTIMIZERS, TOLERANCES, quick=lambda name, dtype: (dtype == "float32") == (name == "Adam")),
)
def test_ranks_train_as_one_process(name: str, dtype: str, size: int) -> None:
    _check(_case(name, dtype=dtype), size, TOLERANCES[dtype])


@pytest.mark.parametrize("transport", ["mpi", "hierarchical", "hierarchical_pairs", "hierarchical_uneven"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_transport_trains_as_one_process(transport: str, size: int) -> None:
    _check(_case("AdamW"), size, 1e-10, transport)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["auto", "hierarchical_pairs"])
@pytest.mark.parametrize("settings", [{}, {"progress": "thread", "fusion_bytes": 100_000}], ids=str)
def test_large_gradients_are_reduced_where_they_are(size: int, transport: str, settings: dict[str, Any]) -> None:
    case = _case("SGD", hidden=9_001, steps=5, passes=2, clip=0.3, options={"lr": 0.001})
    _check(case, size, 1e-10, transport if size > 1 else "auto", settings=settings)


@pytest.mark.parametrize("transport", ["mpi", "shared_memory", "hierarchical_round_robin"])
@pytest.mark.parametrize("compression", ["fp16", NO_BF16])
def test_compression_costs_no_more_than_its_bits(compression: str, transport: str) -> None:
    _check(_case("SGD", dtype="float32"), 3, WIRE_TOLERANCES[compression], transport, compression=compression)


@pytest.mark.native("Horovod compresses inside of a host too")
def test_inside_a_host_nothing_is_compressed() -> None:
    _check(_case("SGD"), 2, 1e-10, "shared_memory", compression="bf16")


# The quick cases have each pair of values.
@pytest.mark.parametrize(
    ("set_to_none", "passes", "how"),
    product(
        [True, False],
        [1, 3],
        ["", "synchronize"],
        quick=lambda set_to_none, passes, how: set_to_none == ((passes == 3) == (how != "")),
    ),
)
def test_accumulation_and_clipping_in_either_way(set_to_none: bool, passes: int, how: str) -> None:
    case = _case("SGD", passes=passes, clip=0.3, set_to_none=set_to_none)
    _check(case, 3, 1e-10, how=how)


@pytest.mark.parametrize("how", ["", "synchronize"])
def test_scaled_loss_and_autocast(how: str) -> None:
    # bfloat16 products of other batch shapes are rounded otherwise: 2^-9 of an update, 20 times.
    _check(_case("SGD", dtype="float32", autocast=True, clip=1.0), 2, 5e-3, how=how)


def test_all_ranks_skip_the_step_in_which_one_overflows() -> None:
    # At the step's infinity every rank must skip, or the next steps differ by a whole update.
    _check(_case("SGD", dtype="float32", autocast=True, infinite_at=7), 2, 5e-3)


SETTINGS: list[dict[str, Any]] = [
    {"fusion_bytes": 0},
    {"fusion_bytes": 256},
    {"fusion_bytes": 64, "buckets_in_flight": 1},
    {"progress": "thread"},
    {"progress": "thread", "fusion_bytes": 300, "buckets_in_flight": 2},
]


@pytest.mark.parametrize(
    ("transport", "settings"),
    product(
        ["shared_memory", "mpi", "hierarchical_pairs"],
        SETTINGS,
        # Each setting, and each transport.
        quick=lambda transport, settings: (
            transport == "mpi" if settings == SETTINGS[-1] else transport == "shared_memory"
        ),
    ),
    ids=str,
)
def test_settings_change_speed_and_not_results(transport: str, settings: dict[str, Any]) -> None:
    _check(_case("Adam"), 3, 1e-10, transport, settings=settings)


@pytest.mark.parametrize("factor", [2, 4.0])
def test_predivision_does_not_change_the_average(factor: float) -> None:
    _check(_case("SGD"), 2, 1e-10, "hierarchical_round_robin", gradient_predivide_factor=factor)


def _all_optimizers() -> list[str]:
    found = [name for name, one in vars(torch.optim).items() if isinstance(one, type)]
    return sorted(
        name
        for name in found
        if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
        and name not in ("Optimizer", "LBFGS", "SparseAdam")  # a closure, sparse gradients: tests of their own
    )


# Of an optimizer this depends on what it does with gradients: one that keeps two moments, one that multiplies matrices,
# one that scales by a norm of the whole parameter, and one that keeps the signs of gradients.
@pytest.mark.native("an engine gives each optimizer the same sums")
@pytest.mark.parametrize("name", quick_ones(_all_optimizers(), "NAdam", "Muon", "Adafactor", "Rprop"))
def test_every_optimizer_of_torch(name: str) -> None:
    _check(Case(name, {"lr": 0.002}, bias=name != "Muon"), 2, 1e-8)
