"""Have glibc's malloc keep the memory that a training step frees, for the next step.

By default glibc gives freed memory back to the kernel at once: each block of more than 32 MiB, and the top of the heap
from twice its largest freed block on. A step frees its gradients and activations, and the next one gets the same memory
as new pages, each after a page fault that clears it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: M_MMAP_THRESHOLD as it is at first, and the largest that glibc accepts on 64 bits before 2.35.
_FIRST_MMAP_THRESHOLD, _OLD_MMAP_LIMIT = 128 << 10, 32 << 20
_INT_MAX = 2**31 - 1


def is_malloc_configured(environ: Mapping[str, str]) -> bool:
    """Do variables of glibc's malloc say what it keeps?"""
    return "glibc.malloc." in environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in environ
    )


def keep_freed_memory(limit: int, environ: Mapping[str, str] | None = None) -> bool:
    """Have malloc keep up to `limit` bytes of freed memory at the top of the heap.

    Blocks of up to an eighth of that come from the heap; larger ones are mapped by themselves, and unmapped when freed,
    since a free block below one in use stays whatever the limit. A thread's heap is made of segments of 64 MiB, of
    which glibc unmaps those that are free.

    Returns whether the thresholds were set: not for 0, not if the user's variables set them, and not in a C library
    without mallopt(). Another malloc that was preloaded takes no notice. Forked processes inherit the thresholds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or limit <= 0 or is_malloc_configured(os.environ if environ is None else environ):
        return False
    block = min(max(limit // 8, _FIRST_MMAP_THRESHOLD), _INT_MAX)
    if not (mallopt(_M_MMAP_THRESHOLD, block) or mallopt(_M_MMAP_THRESHOLD, min(block, _OLD_MMAP_LIMIT))):
        return False  # M_TRIM_THRESHOLD alone would end glibc's adaptation of M_MMAP_THRESHOLD, at the first value
    return bool(mallopt(_M_TRIM_THRESHOLD, min(limit, _INT_MAX)))
