"""The tier of a test, and the process of pytest-xdist that it runs in.

`pytest` runs the quick tier: one case of everything that matters. Beside the marks in the files, tests are marked here:
`slow` those on the other backends of Keras, in the other modes of TensorFlow and on 2 or 4 ranks where 3 do the same,
`horovod_core` those on Horovod's core, `cluster` those on several hosts.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from engines import backend_of, engine_of

#: Parameter -> values that the quick tier leaves out.
_SLOW = {"backend": ("jax", "tensorflow"), "mode": ("eager", "session")}
#: Tests that the quick tier has on these backends too: one that all have, and those of one backend alone.
_QUICK = (
    "test_ranks_train_as_one_process[native-SGD-jax",
    "test_memory_of_jax[native-two_lists_on_jax",
)


def marks_of(item: pytest.Item) -> set[str]:
    """The marks that a test has because of its folder or its parameters."""
    marks = {"cluster"} if "cluster" in item.path.parts else set()
    if engine_of(item) == "horovod":
        marks.add("horovod_core")
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    if any(params.get(name) in values for name, values in _SLOW.items()) and not any(
        name in item.nodeid for name in _QUICK
    ):
        marks.add("slow")
    if any(mark.args == (engine_of(item),) for mark in item.iter_markers("slow_on")):
        marks.add("slow")
    return marks


def find_other_sizes(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests of the adapters on 2 or 4 ranks of which there is the same on 3 ranks."""
    cells: dict[str, dict[int, pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and {"engine", "size"} <= set(callspec.params):
            others = {name: repr(value) for name, value in callspec.params.items() if name != "size"}
            cells.setdefault(f"{item.nodeid.partition('[')[0]} {sorted(others.items())}", {})[
                callspec.params["size"]
            ] = item
    return [item for sizes in cells.values() if 3 in sizes for size, item in sizes.items() if size in (2, 4)]


def group_of(item: pytest.Item) -> str:
    """The group of a test: those of one group are to run one after the other, in one process of pytest-xdist.

    Those that call run_ranks() share the ranks that wait for work: a group for each backend of Keras, and without Keras
    for PyTorch and the rest, by engine; trainings of Keras in the slow tier are so many that they have groups of their
    own. Those that start large jobs of hvdrun's are two groups.
    """
    mark = item.get_closest_marker("group")
    if mark is not None:
        return str(mark.args[0])
    module = getattr(item, "module", None)
    if any(hasattr(module, name) for name in ("run_ranks", "run_check")):
        framework = backend_of(item) or ("PyTorch" if item.path.stem.startswith("test_torch_") else "")
        trains = item.path.stem == "test_keras_training" and item.get_closest_marker("slow") is not None
        return f"ranks {framework} {engine_of(item)}{' training' * trains}"
    return item.path.stem


def begins_early(item: pytest.Item) -> bool:
    """Is the test of a group that takes long? One process would be left with it at the end."""
    return group_of(item).startswith(("ranks", "jobs", "elastic jobs"))
