"""Every number that hvdkit has an aim for, measured here and now beside the peers that are installed.

    python -m benchmarks

Rows with an aim are hvdkit's own, or say how many times as long a peer is to take; "missed" is written where the aim is
not met, and does not make the command fail. A part that fails is shown with the end of its output, and the exit code is
1. It takes up to 15 minutes, and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.parts import PARTS, Done, Part, run_part
from benchmarks.rows import show_rows
from hvdkit.tools.bench.report import describe_machine


def main() -> int:
    """Run the parts, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there as well")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{part.name:<10}{part.about}" for part in PARTS))
        return 0
    wanted = options.only.split(",") if options.only else [part.name for part in PARTS]
    unknown = [name for name in wanted if name not in {part.name for part in PARTS}]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; see --list")
    machine = describe_machine()
    done = run_parts([part for part in PARTS if part.name in wanted])
    print(build_text(machine, done))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "parts": [asdict(one) for one in done]}, indent=1))
    return int(any(one.state == "failed" for one in done))


def run_parts(parts: Sequence[Part]) -> list[Done]:
    """Run one part after the other, and show on stderr how far that is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}"))
    done = []
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(parts))
        for part in parts:
            bar.update(task, description=part.about)
            if not console.is_terminal:
                print(f"benchmarks: {part.name}: {part.about}", file=sys.stderr, flush=True)
            done.append(run_part(part, os.environ))
            bar.advance(task)
    return done


def build_text(machine: dict[str, str], done: Sequence[Done]) -> str:
    """The whole table in Markdown, with the machine above it and what is missing below."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items())]
    lines += ["", show_rows([row for one in done for row in one.rows]), ""]
    judged = [row for one in done for row in one.rows if row.met is not None]
    missed = [f"{row.work}, {row.peer} ({row.aim})" for row in judged if not row.met]
    lines.append(f"{len(judged) - len(missed)} of {len(judged)} aims are met.")
    lines += [f"Missed: {each}" for each in missed]
    lines += [f"{one.name}: {one.state}: {one.why}" for one in done if one.state != "done"]
    lines.append("Took " + ", ".join(f"{one.name} {one.seconds:.0f} s" for one in done if one.seconds) + ".")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
