"""What every benchmark writes with --json, and prints: one row for each work and peer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A measured number beside its aim.

    ratio: of the peer's time to that of `to`, medians within rounds; None where nothing is compared.
    aim: in words, "" for a peer that is there to compare with. met: None without an aim.
    """

    work: str
    peer: str
    median_s: float
    ratio: float | None = None
    to: str = ""
    aim: str = ""
    met: bool | None = None


def write_rows(path: Path, where: str, rows: Sequence[Row]) -> None:
    """Write {"where": ..., "rows": [{"work": ..., "peer": ..., ...}]}. where: the machine and the world, in words."""
    path.write_text(json.dumps({"where": where, "rows": [asdict(row) for row in rows]}, indent=1))


def read_rows(path: Path) -> tuple[str, list[Row]]:
    """Read what `write_rows` has written."""
    found = json.loads(path.read_text())
    return found["where"], [Row(**row) for row in found["rows"]]


def show_rows(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown, with misses marked."""
    lines = ["| work | peer | median | ratio | to | aim |", "|---|---|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"x{row.ratio:.2f}"
        aim = row.aim + (", missed" if row.met is False else "")
        lines.append(f"| {row.work} | {row.peer} | {show_time(row.median_s)} | {ratio} | {row.to} | {aim} |")
    return "\n".join(lines)


def show_time(seconds: float) -> str:
    """Seconds in the unit that suits them: "4.1 us", "48.2 ms", "1.30 s"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else f"{1e6 * seconds:.3g} us"
