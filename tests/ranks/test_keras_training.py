"""Trained with Keras on several ranks, a model is what one process with the whole batch would have made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from keras_ranks import each_backend, each_backend_once_on_three, run_check

import hvdkit
from hvdkit.transport.coding.top_k import TopK

pytestmark = pytest.mark.ranks

SPECS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9},
    "Adam": {"name": "Adam", "learning_rate": 0.01},
    "AdamW": {"name": "AdamW", "learning_rate": 0.01, "weight_decay": 0.1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    "loss_scale_factor": {"loss_scale_factor": 128.0, "clipnorm": 0.05},
    "accumulation": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.05},
    "accumulation cut short": {"gradient_accumulation_steps": 5, "use_ema": True, "weight_decay": 0.01},
}


@each_backend
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_ranks_train_as_one_process(backend: str, name: str) -> None:
    run_check(2, backend, "keras_training:train", SPECS[name])


@each_backend_once_on_three
def test_an_odd_number_of_ranks_trains_as_one_process(backend: str, size: int) -> None:
    run_check(size, backend, "keras_training:train", SPECS["Adam"])


# Each option on PyTorch, and half of them on each of the other backends.
@pytest.mark.native("an engine gives each optimizer the same sums")
@pytest.mark.parametrize(
    ("backend", "option"),
    [
        *(("torch", option) for option in OPTIONS),
        *(("jax", option) for option in list(OPTIONS)[::2]),
        *(("tensorflow", option) for option in list(OPTIONS)[1::2]),
    ],
)
def test_what_an_optimizer_does_with_gradients_it_does_with_those_of_all_ranks(backend: str, option: str) -> None:
    run_check(2, backend, "keras_training:train", {**SPECS["SGD"], **OPTIONS[option]})


@pytest.mark.native("an engine gives each optimizer the same sums")
@each_backend
def test_every_optimizer_of_keras(backend: str) -> None:
    run_check(2, backend, "keras_training:every_optimizer")


@each_backend
@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_are_added_up_or_averaged(backend: str, average: bool) -> None:
    run_check(2, backend, "keras_training:backward_passes", average)


@each_backend_once_on_three
def test_the_sum_is_so_many_averages(backend: str, size: int) -> None:
    run_check(size, backend, "keras_training:sum_of_gradients")


# Each way on PyTorch, and two of them on each of the other backends.
@pytest.mark.parametrize(
    ("backend", "wrap_outer", "steps"),
    [
        ("torch", False, None),
        ("torch", True, 2),
        ("torch", False, 2),
        ("jax", True, 2),
        ("jax", False, None),
        ("tensorflow", True, 2),
        ("tensorflow", False, 2),
    ],
)
def test_all_ranks_skip_the_step_in_which_one_overflows(backend: str, wrap_outer: bool, steps: int | None) -> None:
    run_check(2, backend, "keras_training:mixed_precision", wrap_outer, steps)


@each_backend
def test_a_model_of_mixed_precision_is_wrapped_by_compile(backend: str) -> None:
    run_check(2, backend, "keras_training:mixed_precision_by_compile")


@each_backend
@pytest.mark.parametrize(
    "check",
    [
        "frozen_layers",
        "frozen_gradients",
        "other_numbers_of_gradients",
        "partial",
        "apply_by_hand",
        "two_optimizers",
        "different_models",
    ],
)
def test_in_particular(backend: str, check: str) -> None:
    run_check(2, backend, f"keras_training:{check}")


_TRACING = 200  # seconds, on a busy machine: PyTorch traces a step of Keras in 12 s of processor time


@each_backend
@pytest.mark.parametrize("check", ["own_train_step", "traced_once"])
def test_steps(backend: str, check: str) -> None:
    run_check(2, backend, f"keras_steps:{check}")


def _check_compiled(backend: str, way: int) -> None:
    # What has been made beside a stand-in of PyTorch's compiler is not known to the compiler, so ranks without it.
    env = {"TESTS_STAND_INS": "no"} if backend == "torch" else None
    run_check(2, backend, "keras_steps:jit_compile", way, timeout=_TRACING, env=env)


@pytest.mark.slow
@each_backend
def test_a_compiled_step(backend: str) -> None:
    _check_compiled(backend, 0)


@pytest.mark.slow
@pytest.mark.native("Horovod's core has no shards")
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("way", [1, 2])
def test_compiled_steps(backend: str, way: int) -> None:
    _check_compiled(backend, way)


AGAIN = [
    pytest.param(backend, marks=pytest.mark.slow) for backend in ("jax", "torch")
]  # it loads all frameworks anyway


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", *AGAIN])
def test_all_frameworks_are_in_one_world(backend: str) -> None:
    run_check(2, backend, "keras_steps:other_names")


@pytest.mark.parametrize("backend", ["jax"])
@pytest.mark.parametrize("check", ["jax_by_callback", "jax_works_in_xlas_memory", "two_lists_on_jax"])
def test_memory_of_jax(backend: str, check: str) -> None:
    run_check(2, backend, f"keras_steps:{check}")


@pytest.mark.native("Horovod's core says it in its own words")
@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_gradient_of_another_dtype_or_shape_than_its_variable(backend: str, shard: str | None) -> None:
    run_check(2, backend, "keras_steps:gradients_of_another_kind", shard)


def test_no_memory_of_a_framework_is_laid_out_by_hand() -> None:
    """What XLA hands over is read by JAX's own code, of its own version."""
    folder = Path(hvdkit.__file__).parent / "keras"
    assert not [path.name for path in folder.rglob("*.py") if "ctypes" in path.read_text()]


@each_backend
@pytest.mark.parametrize("as_dense", [False, True])
def test_embeddings(backend: str, as_dense: bool) -> None:
    run_check(2, backend, "keras_training:sparse_embedding", as_dense)


@each_backend
def test_a_process_set_trains_by_itself(backend: str) -> None:
    run_check(3, backend, "keras_training:process_set")


@pytest.mark.native("buckets and transports are hvdkit's own")
@each_backend_once_on_three
@pytest.mark.parametrize("settings", [{"fusion_bytes": 64, "buckets_in_flight": 1}, {"transport": "mpi"}], ids=str)
def test_settings_change_speed_and_not_results(backend: str, size: int, settings: dict[str, Any]) -> None:
    run_check(size, backend, "keras_training:train", SPECS["Adam"], settings=settings)


@pytest.mark.native("arithmetic is hvdkit's own")
@each_backend
def test_sums_of_16_bits_are_made_by_the_fastest_arithmetic(backend: str) -> None:
    fastest = {"tensorflow": "TensorflowArithmetic", "torch": "TorchArithmetic", "jax": "NumpyArithmetic"}
    assert set(run_check(2, backend, "keras_halves:sum_and_cast")) == {fastest[backend]}


@pytest.mark.native("Horovod adds no bfloat16")
@each_backend
def test_compression_inside_a_host_costs_nothing(backend: str) -> None:
    run_check(2, backend, "keras_training:train", SPECS["SGD"], compression="bf16", gradient_predivide_factor=2.0)


@pytest.mark.native("Horovod's core has no codings")
@each_backend
def test_a_coding_that_sends_all_numbers_changes_nothing(backend: str) -> None:
    coded = {"*kernel*": TopK(1.0), "*": TopK(1.0)}
    run_check(2, backend, "keras_training:train", SPECS["SGD"], settings={"transport": "mpi"}, compression=coded)
