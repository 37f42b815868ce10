"""The verdict as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.tools.compare.verdict import Verdict

_KINDS = ("loss", "gradients", "parameters")


def show_json(verdict: Verdict) -> str:
    """Encode the verdict as JSON."""
    return json.dumps({"verdict": "equal" if verdict.equal else "different", **asdict(verdict)}, indent=2)


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print a table of differences, notes, causes, and the verdict in a sentence."""
    console.print(_build_table(verdict))
    for note in verdict.notes:
        console.print(escape(note), style="dim", highlight=False)
    for cause in verdict.causes:
        console.print(f"[bold red]{cause.name}[/]: {escape(cause.seen)}.", highlight=False)
        console.print(f"    {escape(cause.cure)}", highlight=False)
    console.print(
        ("[bold green]" if verdict.equal else "[bold red]") + escape(summarise(verdict)) + "[/]", highlight=False
    )


def summarise(verdict: Verdict) -> str:
    """Write the verdict in a sentence."""
    steps = f"{verdict.steps} step{'s' * (verdict.steps > 1)}"
    if verdict.equal:
        return (
            f"The same training: after {steps} on {verdict.ranks} ranks and on one, parameters are equal within "
            f"{verdict.within:.1e}."
        )
    why = " and ".join(cause.name for cause in verdict.causes)
    if verdict.first is None:
        return f"Not the same training ({why}), though the same batches give the same parameters in {steps}."
    tensor = f" of {verdict.first.tensor}" if verdict.first.tensor else ""
    seen = f"the first difference is in step {verdict.first.step + 1}: {verdict.first.what}{tensor}"
    return f"Not the same training: {seen}, by {verdict.first.size:.1e}; " + (
        f"likely cause: {why}." if why else "cause unknown."
    )


def _build_table(verdict: Verdict) -> Table:
    table = Table(title=f"{verdict.ranks} ranks and 1 rank, with the same batches", title_justify="left", box=SIMPLE)
    table.add_column("step", justify="right")
    for kind in _KINDS:
        table.add_column(kind)
    for number in range(verdict.steps):
        row = []
        for kind in _KINDS:
            rows = [one for one in verdict.differences if one.step == number and one.what == kind]
            style = "" if not rows or rows[0].equal else "red"
            text = "-" if not rows else f"{rows[0].size:.1e}"
            name = f" {escape(rows[0].tensor)}" if rows and rows[0].tensor and not rows[0].equal else ""
            row.append(f"[{style}]{text}{name}[/]" if style else text)
        table.add_row(str(number + 1), *row)
    return table
