"""Find the line of the user's script that is being executed."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

import hvdkit

_CORE = os.path.dirname(os.path.abspath(hvdkit.__file__)) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGES = frozenset(("site-packages", "dist-packages"))
_STARTUP = _CORE + "startup" + os.sep


def user_callsite() -> str:
    """Return "train.py:42" for the innermost frame outside of hvdkit and of libraries; "" without such a frame."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_library(name):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.lru_cache(None)
def _is_library(name: str) -> bool:
    if name.startswith("<") and name not in ("<string>", "<stdin>"):
        return True
    path = os.path.abspath(name)
    # By the folder's name, too: a virtual environment may use packages of the system's, or of another environment.
    if path.startswith((_CORE, _OWN)) or not _PACKAGES.isdisjoint(path.split(os.sep)):
        return True
    paths = sysconfig.get_paths()
    homes = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.startswith(home + os.sep) for home in homes)


def _short(name: str) -> str:
    path = os.path.relpath(name) if os.path.isabs(name) else name
    return name if path.startswith("..") else path


def called_from_hvdkit() -> bool:
    """Was the current call made by hvdkit, outside of hvdkit.startup, and not by the script?"""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_CORE) and not name.startswith(_STARTUP):
            return True
        if not _is_library(name):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
