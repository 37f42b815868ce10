"""LocalSGD and DiLoCo without ranks: which parameters meet when, the outer step, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.request import ReduceOptions
from hvdkit.strategies.diloco import DiLoCo
from hvdkit.strategies.fragments import due_fragment, split_fragments
from hvdkit.strategies.local_sgd import LocalSGD
from hvdkit.strategies.outer import OuterSGD
from hvdkit.transport.coding.blocks import Int8


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_every_tensor_is_in_one_fragment_and_none_is_empty(counts: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, len(counts)))
    parts = split_fragments(counts, fragments)
    assert sorted(index for part in parts for index in part) == list(range(len(counts)))
    assert len(parts) == fragments and all(parts)
    sizes = [sum(counts[index] for index in part) for part in parts]
    assert max(sizes) - min(sizes) <= max(counts)


@given(st.integers(1, 50), st.data())
def test_each_fragment_meets_once_in_a_period(every: int, data: st.DataObject) -> None:
    fragments, period = data.draw(st.integers(1, every)), data.draw(st.integers(0, 3))
    steps = range(period * every + 1, (period + 1) * every + 1)
    due = [due_fragment(step, every, fragments) for step in steps]
    assert [part for part in due if part is not None] == list(range(fragments))
    assert due[-1] == fragments - 1


def test_int8_is_wrong_by_a_254th_of_the_largest_at_most() -> None:
    values = (np.random.RandomState(1).standard_normal(1000) ** 3).astype(np.float32)
    values[256:512] = 0
    values[0] = 1e30
    coder, result = Int8().open(1000, 0, "float32"), np.zeros(1000, np.float32)
    coder.add(result, coder.encode(values), 1)
    for start in range(0, 1000, 256):
        block = slice(start, start + 256)
        assert np.abs(result[block] - values[block]).max() <= np.abs(values[block]).max() / 253.9


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: LocalSGD(0), ValueError, "every is 0; it must be 1 or more"),
        (lambda: LocalSGD(-3), ValueError, "every is -3"),
        (lambda: LocalSGD(2.5), TypeError, "every is 2.5; it must be an integer"),  # type: ignore[arg-type]
        (lambda: LocalSGD(8, start_after=-1), ValueError, "start_after is -1"),
        (lambda: LocalSGD(8, fragments=0), ValueError, "fragments is 0"),
        (lambda: LocalSGD(8, fragments=9), ValueError, "use at most fragments=8"),
        (lambda: DiLoCo(8, overlap=8), ValueError, "use at most overlap=7"),
        (lambda: DiLoCo(8, outer="sgd"), TypeError, "pass hvd.OuterSGD"),  # type: ignore[arg-type]
        (lambda: OuterSGD(0.0), ValueError, "lr is 0.0"),
        (lambda: OuterSGD(float("nan")), ValueError, "lr is nan"),
        (lambda: OuterSGD(0.7, 1.0), ValueError, "momentum is 1.0"),
        (lambda: LocalSGD(8, gradients=AllReduce(ReduceOptions(average=False))), ValueError, "averaged"),
        (lambda: split_fragments([3, 4], 3), ValueError, "only 2 tensors"),
        (lambda: LocalSGD().load_state_dict({"step": 3}), ValueError, "the state has step"),
    ],
)
def test_what_cannot_be_used_is_refused(make: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()
