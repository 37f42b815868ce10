"""Ends the whole job when one rank raises; under plain mpirun the other ranks would wait for it forever."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from hvdkit.errors import describing_command
from hvdkit.log import logger

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

#: These are called with the exception before the job is ended.
_last_calls: list[Callable[[BaseException], object]] = []
_installed: _Hook | None = None
_previous: _Hook | None = None


def on_uncaught(call: Callable[[BaseException], object]) -> None:
    """Register `call` to get an uncaught exception before the job is ended for it; `call` must return soon."""
    _last_calls.append(call)


def install_exception_hook(rank: int | str, host: str, abort: Callable[[int], object] | None) -> None:
    """Install an exception hook that shows a traceback of the main thread, with rank and host, and ends the job.

    rank: this rank's number, or World.label.
    host: this rank's host name.
    abort: called with the exit status, ends all ranks, as MPI's Comm.Abort does; None if the end of this process is
    enough because hvdrun's agent or a scheduler then ends the others. The status is 1, or 130 for KeyboardInterrupt.
    If the program has its own hook, that hook is called instead of writing the plain traceback. Exceptions of other
    threads are not affected.
    Installing again replaces rank, host and abort.
    """
    global _installed, _previous

    def end_the_job(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        status = 130 if issubclass(kind, KeyboardInterrupt) else 1
        try:
            _show(rank, host, kind, error, where)
            for call in _last_calls:
                call(error)
        finally:
            try:
                if abort is not None:
                    abort(status)
            finally:
                # Not sys.exit: finalizers (MPI's above all) would wait for ranks that are waiting for this one.
                os._exit(status)

    uninstall_exception_hook()
    _previous = sys.excepthook
    sys.excepthook = _installed = end_the_job


def uninstall_exception_hook() -> None:
    """Restore the previous exception hook; do nothing if hvdkit's hook is not installed."""
    global _installed, _previous
    # A hook installed after ours may call ours, and we must not remove it.
    if _previous is not None and sys.excepthook is _installed:
        sys.excepthook = _previous
    _installed = _previous = None


class _FoldedStack(traceback.StackSummary):
    """Replaces consecutive frames of hvdkit by one line; the frame that raised the exception is always shown."""

    def format(self, **options: Any) -> list[str]:
        lines = []
        for is_own, group in itertools.groupby(self, lambda frame: frame.filename.startswith(_OWN)):
            frames = list(group)
            hidden = len(frames) - (frames[-1] is self[-1]) if is_own else 0
            if hidden > 1:
                lines.append(f"  ... {hidden} frames of hvdkit (HVDKIT_LOG_LEVEL=debug shows them)\n")
                frames = frames[hidden:]
            lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def _format(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> Iterator[str]:
    shown = traceback.TracebackException(kind, error, where)
    chain: list[traceback.TracebackException | None] = [shown]
    while chain and not logger.isEnabledFor(logging.DEBUG):
        one = chain.pop()
        if one is not None:
            one.stack = _FoldedStack(one.stack)
            chain += [one.__cause__, one.__context__]
    return shown.format()


def _show(
    rank: int | str, host: str, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    # torch.distributed's hook redirects stderr to memory, to show it later; but this process ends here.
    stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    # One write, so that the lines of several failing ranks do not mix.
    command = describing_command(kind)
    more = f" `{command}` describes it." if command else ""
    head = f"hvdkit: rank {rank} on {host} failed with {kind.__name__}; ending the job.{more}\n"
    try:
        with contextlib.redirect_stderr(stream or sys.stderr):
            if _previous is None or _previous is sys.__excepthook__:
                sys.stderr.write(head + "".join(_format(kind, error, where)))
            else:
                sys.stderr.write(head)
                _previous(kind, error, where)
    finally:
        for each in (sys.stdout, stream or sys.stderr):
            each.flush()
