"""gather_state(): the ranges of all ranks become whole tensors on the ranks that want them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

from hvdkit.engine.sharding.whole_state import RangeState, gather_state
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import STORAGE, Buffer

pytestmark = pytest.mark.ranks

COUNTS = [7, 3, 5]  # of the tensors; tensor 1 is on rank 2 only
NAMES = ["first", "second", ""]
DTYPES = {"average": "float64", "rounded": "bfloat16", "sign": "bool"}


def _whole(tensor: int, name: str) -> Any:
    values = np.random.default_rng(10 * tensor + len(name)).integers(0, 2, COUNTS[tensor])
    return values.astype(STORAGE[DTYPES[name]])


def _ranges(rank: int) -> list[RangeState]:
    """Rank 0 has 2 elements of tensor 0, rank 1 has nothing, and rank 2 has the others; `sign` is of tensor 2 only."""
    if rank == 1:
        return []
    bounds = [(0, 0, 2)] if rank == 0 else [(0, 2, 7), (1, 0, 3), (2, 0, 5)]
    return [
        RangeState(
            tensor,
            first,
            stop - first,
            {
                "step": 4,
                **{
                    name: Buffer(_whole(tensor, name)[first:stop].copy(), dtype)
                    for name, dtype in DTYPES.items()
                    if name != "sign" or tensor == 2
                },
            },
        )
        for tensor, first, stop in bounds
    ]


def _gather(wanted: list[int]) -> dict[int, dict[str, Any]]:
    from torch_world import joined

    import hvdkit.torch as hvd
    from hvdkit.engine.groups import global_process_set

    with joined():
        rank = hvd.rank()
        transport = global_process_set.group("the test").transport
        whole = gather_state(transport, _ranges(rank), COUNTS, NAMES, divided=range(3), wanted=rank in wanted)
    return {
        tensor: {name: value.array if isinstance(value, Buffer) else value for name, value in entries.items()}
        for tensor, entries in whole.items()
    }


def _gather_single_elements() -> dict[int, dict[str, Any]]:
    """Gather a tensor of 17 elements, of which rank 2 has one, with a number that all share in an array of one."""
    from torch_world import joined

    import hvdkit.torch as hvd
    from hvdkit.engine.groups import global_process_set

    with joined():
        first, stop = [(0, 9), (9, 16), (16, 17)][hvd.rank()]
        average = Buffer(np.arange(first, stop, dtype="float32"), "float32")
        beta = np.ones(1, "float32")
        entries = {"average": average, "beta": Buffer(beta, "float32") if stop - first == 1 else beta}
        transport = global_process_set.group("the test").transport
        whole = gather_state(transport, [RangeState(0, first, stop - first, entries)], [17], [""])
    return {0: {name: value.array if isinstance(value, Buffer) else value for name, value in whole[0].items()}}


def test_a_number_that_all_share_is_shared_by_a_range_of_one_element_too() -> None:
    for whole in run_ranks(3, _gather_single_elements):
        assert np.array_equal(whole[0]["average"], np.arange(17)) and whole[0]["beta"].tolist() == [1.0]


@pytest.mark.parametrize("wanted", [[0, 1, 2], [1], [0, 2], []], ids=str)
def test_ranks_that_want_it_get_the_whole_state(wanted: list[int]) -> None:
    for rank, whole in enumerate(run_ranks(3, _gather, wanted)):
        assert list(whole) == ([0, 1, 2] if rank in wanted else [])
        for tensor, entries in whole.items():
            assert list(entries) == ["step", "average", "rounded"] + ["sign"] * (tensor == 2)
            assert entries.pop("step") == 4
            for name, values in entries.items():
                assert values.dtype == STORAGE[DTYPES[name]]
                np.testing.assert_array_equal(values, _whole(tensor, name))


def _gather_without(lost: int, without_state: int | None) -> str:
    """Gather without the ranges of a rank, and with those of a tensor without entries; returns the error."""
    from torch_world import joined

    import hvdkit.torch as hvd
    from hvdkit.engine.groups import global_process_set

    with joined():
        ranges = [] if hvd.rank() == lost else _ranges(hvd.rank())
        ranges = [replace(one, entries={}) if one.tensor == without_state else one for one in ranges]
        divided = range(3) if hvd.rank() == 1 else ()  # ranks that have come later do not know it
        transport = global_process_set.group("the test").transport
        try:
            whole = gather_state(transport, ranges, COUNTS, NAMES, divided=divided)
        except HorovodInternalError as error:
            return str(error)
    return f"of {list(whole)}"


def test_a_range_that_no_rank_has_is_an_error_on_all_ranks() -> None:
    for message in run_ranks(3, _gather_without, 0, None):
        assert "'average' of parameter 0 (first) the ranks have 5 of 7 elements" in message
    for message in run_ranks(3, _gather_without, 2, None):
        assert "no elements of the state of parameter 1 (second), parameter 2: the ranks that had them" in message


def test_a_tensor_without_state_on_any_rank_is_left_out() -> None:
    assert run_ranks(3, _gather_without, -1, 1) == ["of [0, 2]"] * 3
