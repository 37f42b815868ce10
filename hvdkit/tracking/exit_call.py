"""The code that the script has given to sys.exit(): Python tells it to nobody who is called at the end of the process.

`raise SystemExit(code)` does not pass here.
"""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

_last: SystemExit | None = None
_previous = sys.exit
_watches = False  # another one may be on top of ours, and calls it


def watch() -> None:
    """Note calls of sys.exit() from now on; harmless if done before."""
    global _last, _previous, _watches
    _last = None
    if not _watches:
        _previous, sys.exit, _watches = sys.exit, _exit, True


def forget() -> None:
    """The script has gone on after a call of sys.exit()."""
    global _last
    _last = None


def stop() -> None:
    """Put back the sys.exit() that was there before, unless another one is on top of this one."""
    global _watches
    if sys.exit is _exit:
        sys.exit, _watches = _previous, False
    forget()


def last() -> SystemExit | None:
    """What the last call has raised in the main thread, if the script has not gone on since."""
    return _last


def _exit(status: object = None, /) -> NoReturn:
    global _last
    try:
        _previous(status)  # type: ignore[arg-type]
    except SystemExit as error:
        if threading.current_thread() is threading.main_thread():
            _last = error.with_traceback(None)
        raise
