"""Numbers on command lines: types for argparse that check the range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from hvdkit.ranges import read_ranges


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    return _whole(text, 1)


def nonnegative_int(text: str) -> int:
    """Read a whole number of at least 0."""
    return _whole(text, 0)


def ranks_or_word(text: str) -> int | str:
    """Read a number of ranks, or the word auto or gpu."""
    if text in ("auto", "gpu"):
        return text
    try:
        return _whole(text, 1)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; use 1 or more, auto or gpu") from None


def rank_list(text: str) -> frozenset[int]:
    """Read a list of ranks, as 0,2 or 0-3,8."""
    try:
        return frozenset(read_ranges(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a list of ranks: {error}; write 0,2 or 0-3,8") from None


def tcp_port(text: str) -> int:
    """Read the number of a TCP port."""
    return _port(text, "1 to 65535")


def tcp_port_or_any(text: str) -> int:
    """Read the number of a TCP port; 0 for any that is free."""
    return 0 if text == "0" else _port(text, "1 to 65535, or 0 for any free port")


def _port(text: str, allowed: str) -> int:
    number = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use {allowed}")
    return number


def positive_seconds(text: str) -> float:
    """Read a duration: more than 0 and finite."""
    return _number(text, "a number of seconds; use more than 0", lambda number: number > 0)


def nonnegative_seconds(text: str) -> float:
    """Read a duration: 0 or more, and finite."""
    return _number(text, "a number of seconds; use 0 or more", lambda number: number >= 0)


def percent(text: str) -> float:
    """Read a percentage: 0 or more, and finite."""
    return _number(text, "a percentage from 0 up", lambda number: number >= 0)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return number


def _number(text: str, wanted: str, allowed: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not allowed(number):
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return number
