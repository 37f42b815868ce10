"""The error for a script that cannot be wrapped, with the script's line."""

from __future__ import annotations

from hvdkit.errors import WrapError
from hvdkit_wrap.places import user_callsite


def refuse(what: str, cure: str, *, line: str = "") -> WrapError:
    """Return the error to raise.

    what: a clause that describes the problem. cure: a sentence. line: of the script; "" for the current line.
    """
    where = line or user_callsite()
    return WrapError(f"hvdrun --wrap: {where + ': ' if where else ''}{what}. {cure}")
