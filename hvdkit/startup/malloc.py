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
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
#: The largest M_MMAP_THRESHOLD that glibc before 2.35 accepts on 64 bits, and the size of a thread's heap segment.
_OLD_MMAP_LIMIT, _HEAP_SEGMENT = 32 << 20, 64 << 20
_INT_MAX = 2**31 - 1


def is_malloc_configured(environ: Mapping[str, str]) -> bool:
    """Do variables of glibc's malloc say what it keeps?"""
    return "glibc.malloc." in environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in environ
    )


def keep_freed_memory(limit: int, environ: Mapping[str, str] | None = None) -> bool:
    """Have malloc keep up to `limit` bytes (of each heap) that were freed, and serve blocks up to that size from heaps.

    Returns whether glibc's thresholds were set: not for 0, not if the user's variables set them, and not in a C library
    without mallopt(). Another malloc that was preloaded takes no notice. Forked processes inherit the thresholds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or limit <= 0 or is_malloc_configured(os.environ if environ is None else environ):
        return False
    limit = min(limit, _INT_MAX)
    if not (mallopt(_M_MMAP_THRESHOLD, limit) or mallopt(_M_MMAP_THRESHOLD, min(limit, _OLD_MMAP_LIMIT))):
        return False  # the other thresholds would end glibc's own adaptation of this one
    # A thread's heap is made of segments; an empty one is unmapped unless top_pad is as large.
    mallopt(_M_TOP_PAD, min(limit, _HEAP_SEGMENT))
    return bool(mallopt(_M_TRIM_THRESHOLD, limit))
