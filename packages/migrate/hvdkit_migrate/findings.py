"""Findings of the rules with their text edits, which are applied together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["change", "break", "better"]


@dataclass(frozen=True)
class Edit:
    """Replace the bytes [start, end) of the script's UTF-8 by `text`; an insertion if start equals end.

    order: order of insertions at the same byte: 0 for lines after a statement, 1 for lines before the next statement, 2
        for text inside that statement.
    """

    start: int
    end: int
    text: str
    order: int = 2


@dataclass(frozen=True)
class Finding:
    """A finding about a line.

    kind: "change", made by the edits; "break", to be done by hand, or the script fails or trains wrongly on many ranks;
        "better", advice.
    line: line in the original script, from 1.
    what: what the finding is, and why.
    write: what to write instead, for "break" and "better".
    edits: the edits of a change.
    """

    kind: Kind
    line: int
    what: str
    write: str = ""
    edits: tuple[Edit, ...] = ()


def merge(findings: Iterable[Finding]) -> tuple[list[Edit], list[Finding]]:
    """Sort the edits of all changes, and leave out changes whose bytes an earlier change replaces.

    Returns the edits, and the changes that were left out. Insertions at the same byte keep the order of the rules.
    """
    taken: list[Edit] = []
    dropped = []
    for finding in findings:
        if any(_collide(edit, other) for edit in finding.edits for other in taken):
            dropped.append(finding)
        else:
            taken += [edit for edit in finding.edits if edit not in taken or edit.start == edit.end]
    return sorted(taken, key=lambda edit: (edit.start, edit.end, edit.order)), dropped


def _collide(one: Edit, other: Edit) -> bool:
    return one != other and one.start < other.end and other.start < one.end


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits that do not overlap, in the order of their bytes."""
    data, out, at = text.encode(), bytearray(), 0
    for edit in edits:
        out += data[at : edit.start] + edit.text.encode()
        at = max(at, edit.end)
    return bytes(out + data[at:]).decode()
