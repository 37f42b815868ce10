"""That freed memory is kept for the next step: counted in page faults, in processes of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdkit.startup.malloc import is_malloc_configured, keep_freed_memory

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library without mallopt()")

#: Pages that the last of some steps touched for the first time; a step takes and frees 48 MiB in blocks of 4 MiB, and
#: one block of 48 MiB. Arguments: the limit in bytes, and "thread" for steps in another thread.
_STEPS = """
import ctypes, resource, sys, threading
from hvdkit.startup.malloc import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    for size, count in (4 << 20, 12), (48 << 20, 1):
        blocks = [libc.malloc(size) for _ in range(count)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        for block in blocks:
            libc.free(block)

def train():
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(faults)

keep_freed_memory(int(sys.argv[1]))
if sys.argv[2] == "thread":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
"""
_PAGES = 2 * (48 << 20) // 4096


def _count_faults(limit: int, where: str = "main", **variables: str) -> int:
    command = [sys.executable, "-c", _STEPS, str(limit), where]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_step_gets_the_pages_of_the_step_before(where: str) -> None:
    assert _count_faults(1 << 30, where) < _PAGES // 10  # a thread's free segments of 64 MiB are unmapped


def test_without_it_each_step_gets_new_pages_so_the_test_above_can_fail() -> None:
    assert _count_faults(0) > _PAGES // 3


def test_no_more_than_the_limit_is_kept() -> None:
    assert _count_faults(16 << 20) > _PAGES // 3


def test_what_the_user_has_set_stays() -> None:
    assert _count_faults(1 << 30, MALLOC_TRIM_THRESHOLD_="131072") > _PAGES // 3
    assert not keep_freed_memory(
        1 << 30, {"GLIBC_TUNABLES": "glibc.cpu.x86_rep_movsb_threshold=1:glibc.malloc.top_pad=1"}
    )


def test_other_variables_are_no_wish_about_malloc() -> None:
    assert not is_malloc_configured({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=x", "MALLOC_CONF": "narenas:2", "HOME": "/"})


@pytest.mark.parametrize(("most", "expected"), [(32 << 20, {-3: 32 << 20, -1: 1 << 30}), (0, {})])
def test_an_older_glibc_gets_the_largest_thresholds_that_it_accepts_or_none(
    most: int, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = {}

    def mallopt(name: int, value: int) -> int:
        if name == -3 and value > most:
            return 0
        accepted[name] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory(1 << 30, {}) is bool(expected)
    assert accepted == expected
