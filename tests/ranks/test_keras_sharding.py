"""DistributedOptimizer(shard=...) of Keras: the variables of the same ranks without, with a part of the state each."""

from __future__ import annotations

from pathlib import Path

import pytest
from keras_ranks import each_backend, run_check

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core has no all-gather of buckets")]

_SOME = ["AdamW", "SGD", "accumulation", "averages", "overwritten", "Momentum"]
_OTHERS = ["Adam", "Adagrad", "RMSprop", "Lion", "Nadam", "Adamax", "Adadelta", "Ftrl"]
_CASES = [
    ("torch", 2, ["Adam", "averages"], "gradients"),
    ("tensorflow", 3, ["Adam", "averages"], "gradients"),
    pytest.param("tensorflow", 2, ["accumulation", *_OTHERS[1:]], "optimizer", marks=pytest.mark.slow),
    pytest.param("tensorflow", 2, _SOME, "gradients", marks=pytest.mark.slow),
    pytest.param("torch", 2, ["accumulation", *_OTHERS], "optimizer", marks=pytest.mark.slow),
    pytest.param("torch", 2, _SOME, "gradients", marks=pytest.mark.slow),
    pytest.param("jax", 2, ["AdamW", "accumulation"], "optimizer", marks=pytest.mark.slow),
    pytest.param("jax", 2, [*_SOME, "Adam", "Nadam"], "gradients", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "size", "specs", "shard"), _CASES)
def test_ranks_train_as_without_shard(backend: str, size: int, specs: list[str], shard: str) -> None:
    run_check(size, backend, "keras_sharding:train", specs, shard)


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
def test_gradients_are_sent_during_backward_on_tensorflow() -> None:
    assert run_check(3, "tensorflow", "keras_freed_gradients:on_tensorflow", "optimizer") == [16] * 3
    assert max(run_check(3, "tensorflow", "keras_freed_gradients:on_tensorflow", "gradients")) <= 4


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
@pytest.mark.parametrize("wrap", ["shard", "LocalSGD"])
def test_variables_exist_once_while_gradients_are_computed_on_tensorflow(wrap: str) -> None:
    assert run_check(2, "tensorflow", "keras_freed_gradients:values_on_tensorflow", wrap) == [1] * 2


@pytest.mark.keras("torch")
def test_gradients_are_sent_during_backward_on_torch() -> None:
    assert min(run_check(2, "torch", "keras_freed_gradients:on_torch", "optimizer")) >= 32
    assert max(run_check(2, "torch", "keras_freed_gradients:on_torch", "gradients")) <= 5


@pytest.mark.slow
@pytest.mark.keras("torch")
@pytest.mark.parametrize("misuse", ["change", "some", "again"])
def test_gradients_that_were_sent_are_not_changed(misuse: str) -> None:
    run_check(2, "torch", "keras_freed_gradients:misused_on_torch", misuse)


@pytest.mark.slow
@pytest.mark.keras("torch")
def test_converted_variables_are_refused_by_name() -> None:
    run_check(2, "torch", "keras_sharding:converted")


@pytest.mark.slow
@pytest.mark.keras("torch")
def test_steps_of_which_a_rank_has_no_part() -> None:
    run_check(2, "torch", "keras_freed_gradients:particular_on_torch")


@pytest.mark.slow
@pytest.mark.keras("jax")
def test_xla_uses_the_memory_of_gradients_again() -> None:
    for whole, parts, gradients in run_check(2, "jax", "keras_freed_gradients:on_jax"):
        assert parts <= whole - gradients // 4, (parts, whole, gradients)


@each_backend
def test_state_is_divided_anew_after_a_commit(backend: str) -> None:
    run_check(3 if backend == "tensorflow" else 2, backend, "keras_sharding:divided_anew", "Nadam")


@each_backend
def test_all_ranks_skip_the_step_in_which_one_overflows(backend: str) -> None:
    run_check(3 if backend == "tensorflow" else 2, backend, "keras_sharding:loss_scale", wrap_outer=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax"])
def test_on_jax(backend: str) -> None:
    run_check(2, backend, "keras_sharding:loss_scale", wrap_outer=True, steps=2)
    run_check(2, backend, "keras_sharding:large", "gradients")
    run_check(2, backend, "keras_sharding:large", "optimizer")


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize("check", ["loops", "refused"])
def test_in_particular(backend: str, check: str) -> None:
    run_check(2, backend, f"keras_sharding:{check}")


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
def test_a_function_of_ones_own() -> None:
    run_check(2, "tensorflow", "keras_sharding:traced")


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
def test_each_rank_keeps_its_part_of_the_state() -> None:
    counts = run_check(3, "tensorflow", "keras_sharding:memory")
    for held, whole in counts:
        assert held <= 1.05 * whole / 3
    assert sum(held for held, _ in counts) >= counts[0][1]


@pytest.mark.keras("torch")
def test_a_damaged_state_is_refused_on_all_ranks_before_anything_changes() -> None:
    run_check(3, "torch", "keras_sharding:damaged")


@pytest.mark.slow
@each_backend
def test_a_state_is_loaded_by_other_ranks(backend: str, tmp_path: Path) -> None:
    name = "Nadam" if backend == "tensorflow" else "Adam"
    run_check(2, backend, "keras_sharding:save", str(tmp_path), name)
    run_check(3, backend, "keras_sharding:load", str(tmp_path), name, "gradients")
    run_check(2, backend, "keras_sharding:load", str(tmp_path), name, None)
