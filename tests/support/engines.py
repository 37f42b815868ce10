"""The adapters' tests run on both engines: hvdkit's own, and Horovod's core where it is installed.

A test of what only hvdkit's own engine does has the mark `native`, with the reason. Under Keras, Horovod's core is on
one backend, and under TensorFlow's training in graphs; on the others and eagerly it trains, and that is all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

ENGINES = ("native", "horovod")
_ADAPTERS = ("test_torch_", "test_tensorflow_", "test_keras_")
#: Parameters of tests that choose among hvdkit's own transports; Horovod has its own, so one of them will do.
_TRANSPORT = ("transport", "over", "progress")
#: Values of parameters that are tried in everything on hvdkit's own engine; Horovod's core sees the same arrays as from
#: the values that are not here.
_AGAIN = {"backend": ("jax", "torch"), "mode": ("eager",)}
_STILL = ("::test_ranks_train_as_one_process[", "test_tensorflow_ops.py::")
_EXAMPLE = "test_tensorflow_example.py::"  # its script is Keras's without fit(), which learns on Horovod's core
_FRESH = "::test_join["  # needs ranks of its own, and each of them TensorFlow


def has_both(module: str) -> bool:
    """Do the tests of this file run on both engines?"""
    return module.startswith(_ADAPTERS) and module != "test_torch_on_horovod"


def engine_of(item: pytest.Item) -> str:
    """The engine that a test runs on."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("engine", "native") if callspec else "native"


def backend_of(item: pytest.Item) -> str:
    """The backend of Keras on the ranks of a test, "" for ranks without Keras."""
    callspec, mark = getattr(item, "callspec", None), item.get_closest_marker("keras")
    return mark.args[0] if mark else callspec.params.get("backend", "") if callspec else ""


def ranks_of(item: pytest.Item) -> tuple[str, str]:
    """Backend of Keras, "" for none, and engine of the ranks that a test calls.

    Tests are sorted by it: ranks.py keeps the ranks, and a framework takes them seconds to import. They change the
    engine between two worlds, once.
    """
    return backend_of(item), engine_of(item)


def choose(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those to run, and those that say nothing about Horovod's core or say it twice."""
    kept, dropped, seen = [], [], set()
    for item in items:
        if engine_of(item) == "horovod":
            params = {**item.callspec.params}  # type: ignore[attr-defined]
            for one in _TRANSPORT:
                params.pop(one, None)
            same = (item.nodeid.partition("[")[0], tuple(sorted((name, repr(one)) for name, one in params.items())))
            if item.get_closest_marker("native") or same in seen or _repeats(item):
                dropped.append(item)
                continue
            seen.add(same)
        kept.append(item)
    return kept, dropped


def _repeats(item: pytest.Item) -> bool:
    """Does a test on Horovod's core show what another backend of Keras, or a graph, shows there?"""
    if _EXAMPLE in item.nodeid:
        return True
    params = item.callspec.params  # type: ignore[attr-defined]
    if params.get("mode") == "session":  # test_sessions has them on Horovod's core, and the mode "graph" each operation
        return True
    still = params.get("size", 2) == 2 and any(name in item.nodeid for name in _STILL) and _FRESH not in item.nodeid
    return not still and any(params.get(name) in values for name, values in _AGAIN.items())


def require_horovod() -> None:
    """Skip the test where Horovod is missing."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed; run: hvdkit build-horovod")
