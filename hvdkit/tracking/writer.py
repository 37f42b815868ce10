"""What a writer is, and what it is told of how a script has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tracking.rows import Averages

#: How a script has ended; MLflow's words.
End = Literal["FINISHED", "FAILED", "KILLED"]


class Writer(Protocol):
    """Writes averages to one place; on one thread, but for its making.

    name: for messages. resume: options of the argument of this name by which another process goes on in the same run.
    """

    name: str
    resume: Mapping[str, str]

    def write(self, rows: Sequence[Averages]) -> None:
        """Write rows, in the order of steps. Raises whatever the library raises."""

    def close(self, end: End | None) -> None:
        """Write what is held back, and end the run; None: another process goes on with it."""


def end_of(error: BaseException | None) -> End:
    """How a script has ended that was left with this exception."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "FINISHED"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return "KILLED" if error.code == TRY_AGAIN or error.code > 128 else "FAILED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
