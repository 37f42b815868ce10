"""hvdrun: run a job from the command line.

This module itself imports little, so that Ctrl-C ends hvdrun with one line soon after its start, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdrun; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    in_main = threading.current_thread() is threading.main_thread()
    # A script ignores SIGINT for what it starts in the background.
    takes_ctrl_c = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_ctrl_c:
        signal.signal(signal.SIGINT, _end_at_once)
    from hvdkit.config import read_environment
    from hvdkit.launch.cli.console import run_command
    from hvdkit.launch.cli.options import parse_arguments
    from hvdkit.launch.start import run_options

    def run() -> int:
        try:
            if takes_ctrl_c:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return run_options(parse_arguments(words), read_environment())
        except KeyboardInterrupt:  # while the job runs, Interruption handles the signal
            print("hvdrun: Ctrl-C.", file=sys.stderr)
            raise

    return run_command("hvdrun", run)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process while it imports modules and has started nothing: an exception can be lost in an import."""
    with contextlib.suppress(OSError):
        os.write(2, b"hvdrun: Ctrl-C: nothing was started.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
