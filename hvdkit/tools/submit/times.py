"""Times as people write them, and as each scheduler wants them."""

from __future__ import annotations

import re

_UNITS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?", re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", re.ASCII)
_EXAMPLES = "Write it like 2h, 90m, 1d12h or 02:00:00"


def parse_time(text: str) -> int:
    """Turn 2h, 90m, 1d12h, 02:00:00 or 1-12:00:00 into seconds.

    Raises ValueError for anything else: a bare number would be minutes to one scheduler and seconds to another.
    """
    found = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        reason = (
            "has no unit"
            if text.isdecimal() and text.strip("0")
            else "is not a time"
            if not found
            else "is no time at all"
        )
        raise ValueError(f"{text!r} {reason}. {_EXAMPLES}.")
    return total


def format_clock(seconds: int, *, days: bool = False) -> str:
    """Write seconds as HH:MM:SS, or with days=True as D-HH:MM:SS where there are any."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if days and hours >= 24:
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{rest:02}"
    return f"{hours:02}:{minutes:02}:{rest:02}"


def format_minutes(seconds: int) -> str:
    """Write seconds as HH:MM, rounded up, as LSF wants it."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"
