"""Applying edits to a text, all at once."""

from __future__ import annotations

from collections.abc import Iterable

from hvdkit.tools.migrate.finding import Edit, Finding


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
