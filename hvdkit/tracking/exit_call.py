"""The script's exit code from sys.exit(), which Python does not pass to functions that run at the process's end.

`raise SystemExit(code)` is not recorded.
"""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

_last: SystemExit | None = None
_previous = sys.exit
_watches = False  # a later wrapper of sys.exit may call ours


def watch() -> None:
    """Record calls of sys.exit() from now on; repeated calls do nothing."""
    global _last, _previous, _watches
    _last = None
    if not _watches:
        _previous, sys.exit, _watches = sys.exit, _exit, True


def forget() -> None:
    """Forget the recorded call, because the script has continued after it."""
    global _last
    _last = None


def stop() -> None:
    """Restore the previous sys.exit(), unless another one has wrapped this one since."""
    global _watches
    if sys.exit is _exit:
        sys.exit, _watches = _previous, False
    forget()


def last() -> SystemExit | None:
    """Return the exception of the last call in the main thread, unless the script has continued since."""
    return _last


def _exit(status: object = None, /) -> NoReturn:
    global _last
    try:
        _previous(status)  # type: ignore[arg-type]
    except SystemExit as error:
        if threading.current_thread() is threading.main_thread():
            _last = error.with_traceback(None)
        raise
