"""Numbers on command lines: types for argparse that say which numbers an option takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def count(text: str) -> int:
    """Read a whole number from 1 up."""
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    """Read a whole number from 0 up."""
    return _whole(text, 0)


def ranks(text: str) -> int:
    """Read a number of ranks. argparse takes `-np2` for `-n p2`."""
    return _whole(text[1:] if text[:1] == "p" and text[1:].isdecimal() else text, 1)


def port(text: str) -> int:
    """Read the number of a TCP port."""
    number = int(text) if text.isdecimal() else 0
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port; they go from 1 to 65535")
    return number


def seconds(text: str) -> float:
    """Read a duration: more than 0 and finite."""
    return _duration(text, "more than 0", lambda number: number > 0)


def seconds_or_none(text: str) -> float:
    """Read a duration: 0 or more, and finite."""
    return _duration(text, "0 or more", lambda number: number >= 0)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")
    return number


def _duration(text: str, wanted: str, allowed: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not allowed(number):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, {wanted}")
    return number
