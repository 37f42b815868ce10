"""The command line of this process, which all users of the host can read (ps)."""

from __future__ import annotations

import os
from collections.abc import Iterable

_ARG_START, _ARG_END = 45, 46  # fields 48 and 49 of /proc/PID/stat, see proc(5); counted from the third


def hide_values(words: Iterable[str]) -> None:
    """Overwrite each VALUE of these words NAME=VALUE in the command line of this process with asterisks.

    A process that read the command line before has seen the values. Does nothing if the system does not show the
    address of the command line.
    """
    wanted = [os.fsencode(word) for word in words if "=" in word]
    if not wanted:
        return
    import ctypes  # not needed for most commands

    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/self/cmdline", "rb") as file:
            line = file.read()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, ValueError, IndexError):
        return
    if start and end - start == len(line) and ctypes.string_at(start, len(line)) == line:
        ctypes.memmove(start, b"\0".join(_hide(word, wanted) for word in line.split(b"\0")), len(line))


def _hide(word: bytes, wanted: Iterable[bytes]) -> bytes:
    for one in wanted:
        if word.endswith(one):  # -xNAME=VALUE and --env=NAME=VALUE are one word
            length = len(one.partition(b"=")[2])
            return word[: len(word) - length] + b"*" * length
    return word
