"""What a strategy and its driver know of each other."""

from __future__ import annotations

import gc
import weakref

import pytest

from hvdkit.engine.api import Parameters, Strategy
from hvdkit.engine.planned.arrays import ArraySource


def test_a_strategy_of_own_tensors_is_refused_where_there_are_arrays_only() -> None:
    parameters = Parameters("arrays.1", (), ArraySource(0), ArraySource(0))
    with pytest.raises(TypeError, match=r"op=hvd.Adasum works on tensors of a framework, but arrays.1 has arrays"):
        parameters.own_tensors("op=hvd.Adasum")


def test_a_strategy_says_by_an_attribute_that_it_uses_values() -> None:
    class Changes(Strategy):
        def after_step(self) -> None: ...

    class Delegates(Changes):
        uses_values = False

        def after_step(self) -> None: ...

    assert (Strategy.uses_values, Changes.uses_values, Delegates.uses_values) == (False, True, False)


def test_a_strategy_does_not_keep_its_driver() -> None:
    class Driver: ...

    strategy, driver = Strategy(), Driver()
    strategy.driver = weakref.ref(driver)
    del driver
    gc.collect()
    assert strategy.driver() is None
    assert Strategy().driver is None
