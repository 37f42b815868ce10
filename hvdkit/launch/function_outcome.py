"""The outcome of a function on one rank, as it is sent to the process that started the ranks."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdkit.errors import HorovodInternalError

Dumps = Callable[[Any], bytes]

_HVDKIT = f"{Path(__file__).parents[1]}/"


@dataclass(frozen=True)
class FunctionOutcome:
    """The value that a function returned, or the exception that it raised.

    error: pickled by itself, because the receiver may not know its class; b"" if the function returned.
    summary, traceback: of the error, with the rank's own lines. internal: is it a HorovodInternalError?
    """

    value: Any = None
    error: bytes = b""
    summary: str = ""
    traceback: str = ""
    internal: bool = False

    @property
    def raised(self) -> bool:
        """Did the function raise an exception?"""
        return bool(self.error)

    def load_error(self) -> Exception:
        """Return the exception, or a RuntimeError with its type and text if its class is unknown."""
        try:
            error = pickle.loads(self.error)
        except Exception:  # whatever its class does
            error = None
        return error if isinstance(error, Exception) else _replace(self.summary, self.internal)

    def get(self, where: str) -> Any:
        """Return the value, or raise the exception, with its traceback as cause. where: names the rank in the cause."""
        if self.raised:
            raise self.load_error() from HorovodInternalError(f"The function failed on {where}:\n{self.traceback}")
        return self.value


def describe_error(error: BaseException, dumps: Dumps) -> FunctionOutcome:
    """Describe an exception that a function has raised on this rank.

    dumps: of the pickle module that it is sent with. An exception that cannot be pickled and unpickled, or does not
    derive from Exception, is replaced by a RuntimeError with its type and text; a HorovodInternalError is replaced by
    another HorovodInternalError.
    """
    internal = isinstance(error, HorovodInternalError)
    summary, text = _summarize(error), "".join(traceback.format_exception(type(error), error, own_frames(error)))
    try:
        data = dumps(error) if isinstance(error, Exception) else b""
        if data:
            pickle.loads(data)
    except Exception:  # whatever its class does
        data = b""
    data = data or pickle.dumps(_replace(summary, internal))
    return FunctionOutcome(error=data, summary=summary, traceback=text, internal=internal)


def own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of hvdkit that called the function; all of it if it has no others."""
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename.startswith(_HVDKIT):
        where = where.tb_next
    return where or error.__traceback__


def pickle_outcome(outcome: FunctionOutcome, dumps: Dumps) -> tuple[FunctionOutcome, bytes]:
    """Return an outcome and its pickle; a value that cannot be pickled becomes a TypeError that names its type."""
    try:
        return outcome, dumps(outcome)
    except Exception as error:  # whatever the class of the value does
        kind = type(outcome.value).__name__
        why = TypeError(f"The function returned a {kind}, which cannot be pickled: {_summarize(error)}")
        failed = describe_error(why, dumps)
        return failed, dumps(failed)


def _summarize(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _replace(summary: str, internal: bool) -> Exception:
    # Other errors are not replaced by HorovodInternalError: that means a lost rank, after which elastic jobs continue.
    return HorovodInternalError(summary) if internal else RuntimeError(summary)
