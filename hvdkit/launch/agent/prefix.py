"""The rank before each line."""

from __future__ import annotations

import re

# Returns to a line's start or its end, a control sequence (CSI, OSC, the short ones), text.
_TOKENS = re.compile(
    rb"\r+\n?|\n|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|[^\r\n\x1b]+|\x1b"
)
# A control sequence, or a line's end, that is not all there yet.
_UNFINISHED = re.compile(rb"(?:\r+|\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[ -/]*))\Z")
_LONGEST_SEQUENCE = 256

# Of the terminal's text: cyan, green, yellow, magenta, blue; red is left to errors.
_COLOURS = (36, 32, 33, 35, 34)


def colour_prefix(prefix: bytes, rank: int, wish: str) -> bytes:
    """Write a prefix in the rank's colour, if that is the wish (HVDKIT_PREFIX=colour)."""
    if wish != "colour":
        return prefix
    return b"\x1b[%dm%b\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], prefix.rstrip())


class Prefixer:
    """Puts a prefix before the text of each line, also where a program goes back to a line's start to draw it anew.

    terminal: the program draws on a terminal; an empty line gets no prefix, because it may be a place to draw on.
    """

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        self._prefix, self._terminal = prefix, terminal
        self._at_start, self._tail = True, b""

    def feed(self, data: bytes) -> bytes:
        """Return `data` with prefixes; a control sequence that is cut off comes with the next call."""
        data = self._tail + data
        unfinished = _UNFINISHED.search(data, max(0, len(data) - _LONGEST_SEQUENCE))
        end = unfinished.start() if unfinished else len(data)
        data, self._tail = data[:end], data[end:]
        if not data:
            return b""
        if self._terminal or b"\r" in data or b"\x1b" in data:
            return b"".join(self._mark(data))
        marked = (self._prefix if self._at_start else b"") + data.replace(b"\n", b"\n" + self._prefix)
        self._at_start = data.endswith(b"\n")
        return marked.removesuffix(self._prefix) if self._at_start else marked

    def finish(self) -> bytes:
        """Return what was held back."""
        tail, self._tail = self._tail, b""
        return tail

    def _mark(self, data: bytes) -> list[bytes]:
        parts = []
        for token in _TOKENS.findall(data):
            newline = token.endswith(b"\n")
            text = not newline and token[:1] not in (b"\r", b"\x1b")
            if self._at_start and (text or (newline and not self._terminal)):
                parts.append(self._prefix)
            parts.append(token)
            if text:
                self._at_start = False
            elif newline or token.startswith(b"\r"):
                self._at_start = True
        return parts
