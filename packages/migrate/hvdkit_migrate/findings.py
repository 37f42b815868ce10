"""Findings of the rules, and the text edits that go with them, applied together."""

from __future__ import annotations

from collections.abc import Iterable
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


def merge(findings: Iterable[Finding]) -> tuple[list[Edit], list[Finding]]:
    """Put the edits of all changes in order, and leave out changes that want bytes an earlier one has.

    Returns the edits, and the changes that were left out. Insertions at the same place keep the order of the rules.
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
    """Apply edits that do not overlap, in the order of their places."""
    data, out, at = text.encode(), bytearray(), 0
    for edit in edits:
        out += data[at : edit.start] + edit.text.encode()
        at = max(at, edit.end)
    return bytes(out + data[at:]).decode()
