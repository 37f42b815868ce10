"""What came of many faults, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from faults.plan import KINDS
from faults.play import Outcome


def make_table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each kind that has happened."""
    table = Table(title="What happened, and what came of it")
    table.add_column("fault")
    for name in ("times", "went on", "ended, with code", "longest s to the next steps", "to the end"):
        table.add_column(name, justify="right")
    for name, kind in KINDS.items():
        mine = [one for one in outcomes if one.kind == name]
        if mine:
            codes = Counter(one.code for one in mine if one.code is not None)
            ended = ", ".join(f"{times} with {code}" for code, times in sorted(codes.items()))
            table.add_row(
                kind.what,
                str(len(mine)),
                str(len(mine) - codes.total()),
                ended,
                _longest([one for one in mine if one.code is None]),
                _longest([one for one in mine if one.code is not None]),
            )
    return table


def _longest(outcomes: Sequence[Outcome]) -> str:
    return f"{max(one.took_s for one in outcomes):.1f}" if outcomes else ""
