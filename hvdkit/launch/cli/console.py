"""Run the command of hvdrun or hvdkit, and print an error, such as a full disk, in one line."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Callable

from hvdkit.errors import HvdkitError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command; returns its exit code, or 2 for an HvdkitError, which is printed after the program's name.

    Returns 128+n for SIGINT (Ctrl-C), and for SIGPIPE if the reader of stdout has ended, as in `hvdkit doctor | head`.
    Standard streams that are closed (`>&-`) are opened on /dev/null.
    """
    _open_closed_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except HvdkitError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _reader_has_ended():
            raise  # another pipe than stdout
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        what = error.filename or ("the output or a file" if _can_flush() else "the output")
        _discard_output()
        print(f"{program}: {what} cannot be written: {error.strerror}.", file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if they are closed: another file would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's own
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _reader_has_ended() -> bool:
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _can_flush() -> bool:
    """Can the contents of stdout's buffer be written? They remain in the buffer after a failure."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _discard_output() -> None:
    """Make Python discard the rest of stdout's buffer at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
