"""A thread that looks after device groups with work under way: the host does not wait for it, so nobody else does."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref

from hvdkit.errors import HvdkitError
from hvdkit.transport.cuda import allow_captures
from hvdkit.transport.nccl.group import DeviceGroup

_INTERVAL_S = 0.5
_groups: weakref.WeakSet[DeviceGroup] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(group: DeviceGroup) -> None:
    """Have the group's inspect() called every half second, until the group is collected."""
    global _thread
    with _lock:
        _groups.add(group)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, name="hvdkit-nccl", daemon=True)
            _thread.start()


def _look() -> None:
    with contextlib.suppress(HvdkitError):
        allow_captures()
    pause = threading.Event()
    while not pause.wait(_INTERVAL_S):
        with _lock:
            groups = list(_groups)
        for group in groups:
            group.inspect(groups)


def _forget() -> None:
    """After a fork: the thread is the parent's."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _groups.clear()


os.register_at_fork(after_in_child=_forget)
