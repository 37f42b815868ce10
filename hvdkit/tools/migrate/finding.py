"""What a rule has to say about a script, and the changes of text that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["change", "break", "better"]


@dataclass(frozen=True)
class Edit:
    """Put `text` in place of the bytes [start, end) of the script's UTF-8; an insertion if they are the same.

    order: of insertions at the same byte, lines after a statement are 0, lines before the next one 1, what is put into
        that one 2.
    """

    start: int
    end: int
    text: str
    order: int = 2


@dataclass(frozen=True)
class Finding:
    """One thing about a line.

    kind: "change", made by the edits; "break", to be done by hand, or the script fails or trains wrongly on many ranks;
        "better", advice.
    line: in the script as it is, from 1. what: what and why. write: what to write instead, for the last two.
    """

    kind: Kind
    line: int
    what: str
    write: str = ""
    edits: tuple[Edit, ...] = ()
