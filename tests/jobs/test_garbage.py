"""That what a framework has imported is left out of garbage collections; in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNTS = """
import gc, os
os.environ["HVDKIT_GC_FREEZE"] = "{setting}"
{before}
import hvdkit.torch as hvd

class Node:
    pass

hvd.init()
frozen = gc.get_freeze_count()
hvd.shutdown()
garbage = [Node() for _ in range(1000)]
for node in garbage:
    node.itself = node
del garbage, node
collected = gc.collect()
hvd.init()
print(frozen > 100_000, gc.get_freeze_count() <= frozen, collected >= 1000)
"""


def _run(setting: int, before: str) -> list[str]:
    script = _COUNTS.format(setting=setting, before=before)
    return subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    ).stdout.split()


@pytest.mark.parametrize(
    ("setting", "before", "frozen"),
    [
        pytest.param(1, "", "True", marks=pytest.mark.slow),
        (0, "", "False"),
        pytest.param(1, "gc.disable()", "False", marks=pytest.mark.slow),
    ],
)
def test_what_is_there_at_the_first_init_is_frozen_and_later_garbage_is_collected(
    setting: int, before: str, frozen: str
) -> None:
    assert _run(setting, before) == [frozen, "True", "True"]
