"""What a task of the soak test is given and should give, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numbers_of_ranks import FLOATS
from numpy.typing import NDArray
from soak_plan import Task
from test_adasum import tree

Values = NDArray[np.float64]

#: Largest error, of the largest number there is.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "float64": 1e-12}
_PERIOD = 997  # numbers that are drawn for a tensor, and repeated
_REDUCE: dict[str, Any] = {"Average": np.sum, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}


def given(task: Task, tensor: int, member: int, salt: int) -> Values:
    """What a member brings: numbers so small that no reduction overflows, and sums are exact in every dtype."""
    dtype, shape = task.dtypes[tensor], task.shape(tensor, member)
    low, high = (0, 2) if dtype == "bool" else (0 if dtype.startswith("uint") else -10, 11)
    if task.op == "Product" and dtype != "bool":
        low, high = 1, 3
    drawn = np.random.default_rng([salt, task.key, tensor, member]).integers(low, high, _PERIOD)
    return np.resize(drawn, shape).astype(np.float64)


def expected(task: Task, rank: int, salt: int) -> list[Values]:
    """What a member, given by its rank in the world, gets for each tensor."""
    me = task.members.index(rank)
    return [
        _EXPECTED[task.kind](task, at, me, [given(task, at, member, salt) for member in range(len(task.members))])
        for at in range(len(task.dtypes))
    ]


def _reduced(task: Task, at: int, inputs: Sequence[Values]) -> Values:
    dtype, (before, after), size = task.dtypes[at], task.factors, len(inputs)
    if task.op == "Adasum":
        return tree([each.reshape(-1) for each in inputs]).reshape(inputs[0].shape)
    if dtype == "bool":
        some: Any = np.any if task.op in ("Sum", "Max") else np.all
        return np.asarray(some(inputs, axis=0), np.float64)
    whole = dtype not in FLOATS
    scaled = [np.trunc(each * before) if whole else each * before for each in inputs]
    result: Values = _REDUCE[task.op](scaled, axis=0)
    result = result * after / (size if task.op == "Average" else 1)
    return np.asarray(np.trunc(result) if whole else result)


def _allreduce(task: Task, at: int, me: int, inputs: Sequence[Values]) -> Values:
    return _reduced(task, at, inputs)


def _reducescatter(task: Task, at: int, me: int, inputs: Sequence[Values]) -> Values:
    each, more = divmod(len(inputs[0]), len(inputs))
    start = me * each + min(me, more)
    return _reduced(task, at, inputs)[start : start + each + (me < more)]


def _allgather(task: Task, at: int, me: int, inputs: Sequence[Values]) -> Values:
    return np.concatenate(inputs)


def _broadcast(task: Task, at: int, me: int, inputs: Sequence[Values]) -> Values:
    return inputs[task.members.index(task.root)]


def _alltoall(task: Task, at: int, me: int, inputs: Sequence[Values]) -> Values:
    size = len(inputs)
    splits = task.splits or ((len(inputs[0]) // size,) * size,) * size
    starts = [sum(each[:me]) for each in splits]
    return np.concatenate(
        [one[start : start + each[me]] for one, start, each in zip(inputs, starts, splits, strict=True)]
    )


_EXPECTED = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
}


def find_difference(got: Values, wanted: Values, dtype: str) -> str:
    """Say where a result is wrong; "" if it is right."""
    if got.shape != wanted.shape:
        return f"its shape is {got.shape} and should be {wanted.shape}"
    tolerance = TOLERANCE.get(dtype, 0.0) * np.abs(wanted).max(initial=0.0)
    wrong = np.flatnonzero(~(np.abs(got - wanted) <= tolerance))
    if not wrong.size:
        return ""
    first = wrong[0]
    return (
        f"{wrong.size} of {got.size} numbers are wrong; at {first} it has {got.reshape(-1)[first]!r} and should have "
        f"{wanted.reshape(-1)[first]!r}"
    )
