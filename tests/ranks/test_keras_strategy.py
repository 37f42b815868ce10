"""DistributedOptimizer(strategy=...) of Keras: strategies that know no framework, on each backend."""

from __future__ import annotations

import pytest
from averaging import LateAverage, NamedAverage
from keras_ranks import each_backend, run_check
from test_keras_training import SPECS

from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.strategy import Strategy

pytestmark = pytest.mark.ranks


@each_backend
@pytest.mark.parametrize(
    "strategy",
    [
        NamedAverage(),
        pytest.param(LateAverage(), marks=pytest.mark.slow),
        pytest.param(AllReduce(), marks=pytest.mark.slow),
    ],
    ids=lambda it: type(it).__name__,
)
def test_a_strategy_of_ones_own_trains_as_one_process(backend: str, strategy: Strategy) -> None:
    run_check(2, backend, "keras_training:train", SPECS["SGD"], strategy=strategy)


@each_backend
@pytest.mark.parametrize(
    ("passes", "scaled"),
    [(1, False), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_parameters_averaged_now_and_then(backend: str, passes: int, scaled: bool) -> None:
    run_check(2, backend, "keras_strategies:periodic", passes, scaled)


@each_backend
@pytest.mark.parametrize("check", ["lists", "refused", "local_steps", "caught_mismatch"])
def test_in_particular(backend: str, check: str) -> None:
    run_check(2, backend, f"keras_strategies:{check}")


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_tape_with_a_strategy_of_ones_own(mode: str) -> None:
    wrap = {"strategy": NamedAverage()}
    run_check(2, "tensorflow", "tensorflow_training:as_one_process", mode, ["SGD"], "auto", wrap)


@pytest.mark.slow
@pytest.mark.keras("tensorflow")
def test_strategies_that_a_tape_refuses() -> None:
    run_check(1, "tensorflow", "tensorflow_training:refused_strategies")
