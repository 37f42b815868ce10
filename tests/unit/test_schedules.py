from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.training.schedules import linear_scale, square_root_scale, warmup_multiplier

FACTORS = st.floats(0.01, 1000)
EPOCHS = st.floats(0, 100)


def test_the_batch_of_goyal_scales_the_learning_rate_by_32() -> None:
    assert linear_scale(8192, reference=256) == 32


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_square_root_rule_squared_is_the_linear_rule(batch_size: int, reference: int) -> None:
    root = square_root_scale(batch_size, reference=reference)
    assert root * root == pytest.approx(linear_scale(batch_size, reference=reference))


@pytest.mark.parametrize("scale", [linear_scale, square_root_scale])
def test_a_batch_without_samples_is_an_error(scale: object) -> None:
    assert callable(scale)
    with pytest.raises(ValueError, match="must be 1 or more"):
        scale(0, reference=32)


@given(FACTORS, st.floats(0.1, 20))
def test_warm_up_begins_with_the_unscaled_rate_and_ends_with_the_scaled_one(factor: float, epochs: float) -> None:
    assert warmup_multiplier(0, factor=factor, warmup_epochs=epochs) * factor == pytest.approx(1)
    assert warmup_multiplier(epochs, factor=factor, warmup_epochs=epochs) == 1


@given(EPOCHS, EPOCHS, st.floats(1, 1000), st.floats(0, 20))
def test_warm_up_never_falls_when_the_rate_was_raised(a: float, b: float, factor: float, epochs: float) -> None:
    first, second = (warmup_multiplier(epoch, factor=factor, warmup_epochs=epochs) for epoch in sorted((a, b)))
    assert first <= second + 1e-12
    assert second <= 1 + 1e-12


def test_warm_up_is_a_straight_line() -> None:
    rates = [8 * warmup_multiplier(epoch, factor=8, warmup_epochs=5) for epoch in (0, 1, 2.5, 5, 6)]
    assert rates == pytest.approx([1, 2.4, 4.5, 8, 8])


@given(EPOCHS, FACTORS)
def test_no_warm_up_leaves_the_rate_alone(epoch: float, factor: float) -> None:
    assert warmup_multiplier(epoch, factor=factor, warmup_epochs=0) == 1


def test_a_warm_up_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="factor is 0"):
        warmup_multiplier(0, factor=0, warmup_epochs=5)
    with pytest.raises(ValueError, match="warmup_epochs is -1"):
        warmup_multiplier(0, factor=2, warmup_epochs=-1)
