"""What every benchmark writes with --json, and prints: one row for each work and peer."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdkit.tools.bench.report import show_time


@dataclass(frozen=True)
class Row:
    """A measured number beside its aim.

    median_s: seconds; None for memory, which is in `mb` (10^6 bytes).
    ratio: of the peer's time to that of `to`, medians within rounds; None where nothing is compared.
    aim: in words, "" for a peer that is there to compare with. met: None without an aim.
    """

    work: str
    peer: str
    median_s: float | None
    ratio: float | None = None
    to: str = ""
    aim: str = ""
    met: bool | None = None
    mb: float | None = None


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
        value = f"{row.mb or 0:.0f} MB" if row.median_s is None else show_time(row.median_s)
        lines.append(f"| {row.work} | {row.peer} | {value} | {ratio} | {row.to} | {aim} |")
    return "\n".join(lines)


def positive(text: str) -> float:
    """Read a number of more than 0, as a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of more than 0")
    return number


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, with --json. about: the module's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    return parser


def finish(rows: Sequence[Row], where: str, path: Path | None, *, first: bool = True) -> None:
    """Print the rows, and write them if there is a path. first: whether this is rank 0, which alone does so."""
    if first:
        print(f"{where}\n\n{show_rows(rows)}", flush=True)
        if path:
            write_rows(path, where, rows)
