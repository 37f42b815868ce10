"""What cannot be wrapped: an error with the script's line."""

from __future__ import annotations

from hvdkit.errors import WrapError
from hvdkit.wrap.places import script_line


def refuse(what: str, cure: str, *, line: str = "") -> WrapError:
    """The error to raise. what: a clause about what was seen; cure: a sentence. line: of the script; now's if empty."""
    where = line or script_line()
    return WrapError(f"hvdrun --wrap: {where + ': ' if where else ''}{what}. {cure}")
