"""Makes glibc's malloc keep the memory that a training step frees, for the next step.

By default glibc returns freed memory to the kernel at once: each block of more than 32 MiB, and the top of the heap
from twice its largest freed block on. A step frees its gradients and activations, and the next step gets the same
memory as new pages, each after a page fault that clears it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The initial M_MMAP_THRESHOLD, and the largest value that glibc before 2.35 accepts on 64 bits.
_FIRST_MMAP_THRESHOLD, _OLD_MMAP_LIMIT = 128 << 10, 32 << 20
_INT_MAX = 2**31 - 1


def is_malloc_configured(environ: Mapping[str, str]) -> bool:
    """Return whether variables of glibc's malloc set its thresholds."""
    return "glibc.malloc." in environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in environ
    )


def keep_freed_memory(limit: int, environ: Mapping[str, str] | None = None) -> bool:
    """Make malloc keep up to `limit` bytes of freed memory at the top of the heap.

    Blocks of up to an eighth of `limit` come from the heap. Larger blocks are mapped separately and unmapped when
    freed, because a free block below a used block stays in the heap whatever the limit is. A thread's heap consists of
    segments of 64 MiB, and glibc unmaps the free segments.

    Returns whether the thresholds were set: not for 0, not if the user's variables set them, and not in a C library
    without mallopt(). A preloaded malloc of another library ignores them. Forked processes inherit the thresholds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or limit <= 0 or is_malloc_configured(os.environ if environ is None else environ):
        return False
    block = min(max(limit // 8, _FIRST_MMAP_THRESHOLD), _INT_MAX)
    if not (mallopt(_M_MMAP_THRESHOLD, block) or mallopt(_M_MMAP_THRESHOLD, min(block, _OLD_MMAP_LIMIT))):
        return False  # M_TRIM_THRESHOLD alone would stop glibc's adaptation of M_MMAP_THRESHOLD at its initial value
    return bool(mallopt(_M_TRIM_THRESHOLD, min(limit, _INT_MAX)))
