"""Where in the user's script something happens."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def script_line() -> str:
    """ "train.py:42" of the innermost frame that is neither hvdkit's nor a library's; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_library(name):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def caller_is_ours(depth: int = 2) -> bool:
    """Is the function that called the caller hvdkit's own?"""
    return sys._getframe(depth).f_code.co_filename.startswith(_HERE)


@functools.lru_cache(None)
def _is_library(name: str) -> bool:
    if name.startswith("<") and name not in ("<string>", "<stdin>"):
        return True
    path = os.path.abspath(name)
    paths = sysconfig.get_paths()
    homes = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return path.startswith(_HERE) or any(path.startswith(home + os.sep) for home in homes)


def _short(name: str) -> str:
    path = os.path.relpath(name) if os.path.isabs(name) else name
    return name if path.startswith("..") else path
