"""What doctor prints for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.tools.doctor.abilities import Ability, judge_engines, judge_transports, list_choices
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import SEVERITIES, Finding
from hvdkit.tools.doctor.show.rows import list_parts

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_report(facts: Facts, findings: Sequence[Finding], console: Console) -> None:
    """Print parts, abilities, choices, then findings: what matters most stands last, where it is seen."""
    console.print(build_table(f"what is here: {facts.host}", ("part", "what", "where"), list_parts(facts)))
    abilities = [*_list_abilities("engine", judge_engines(facts)), *_list_abilities("", judge_transports(facts))]
    console.print(build_table("what works here", ("", "name", "works", "why"), abilities))
    choices = [(choice.start, choice.engine, choice.transport, choice.why) for choice in list_choices(facts)]
    console.print(build_table("what would be taken", ("start", "engine", "transport", "why"), choices))
    print_findings(findings, console)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print each finding as a short paragraph, and a last line that counts them."""
    for finding in findings:
        where = f" [{', '.join(finding.hosts)}]" if finding.hosts else ""
        style = _STYLES[finding.severity]
        console.print(f"[{style}]{finding.severity}[/] {escape(finding.name)}{escape(where)}: {escape(finding.seen)}")
        console.print(f"    {escape(finding.cure)}", highlight=False)
    counts = {name: sum(finding.severity == name for finding in findings) for name in SEVERITIES}
    told = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    console.print(told or "Nothing is wrong.")


def _list_abilities(kind: str, abilities: Iterable[Ability]) -> Iterable[tuple[str, ...]]:
    for number, ability in enumerate(abilities):
        why = " ".join([f"{ability.why}.", ability.cure]) if ability.cure else ability.why
        yield (kind or "transport") if not number else "", ability.name, "yes" if ability.works else "no", why


def build_table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table of plain text."""
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for name in titles:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
