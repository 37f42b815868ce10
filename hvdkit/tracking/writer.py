"""The interface of a writer, and how a script has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tracking.rows import Averages

#: How a script has ended, in MLflow's words.
End = Literal["FINISHED", "FAILED", "KILLED"]


class Writer(Protocol):
    """Writes averages to one target, on one thread; another thread may construct it.

    name: for messages. resume: options, for the argument of this name, by which another process continues the same run.
    """

    name: str
    resume: Mapping[str, str]

    def write(self, rows: Sequence[Averages]) -> None:
        """Write rows, in the order of steps. Raises whatever the library raises."""

    def close(self, end: End | None) -> None:
        """Write buffered rows, and end the run; None: another process continues it. Follows a failed write() too."""


def end_of(error: BaseException | None) -> End:
    """Return how a script has ended that raised this exception."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "FINISHED"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return "KILLED" if error.code == TRY_AGAIN or error.code > 128 else "FAILED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
