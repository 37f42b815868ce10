"""The report of a run on the first GPU, in Markdown, from the outcomes of its stages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.first_gpu.run import Outcome


def write_report(device: str, outcomes: Sequence[Outcome]) -> str:
    """Write the report: a sentence with the verdict, a table of the stages, then each stage's own results."""
    count = {
        state: sum(each.state == state for each in outcomes)
        for state in ("done", "failed", "too slow", "skipped", "not run")
    }
    verdict = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    title = "# First GPU\n\n" if device == "cuda" else "# First GPU: a rehearsal without one\n\n"
    note = "" if device == "cuda" else "Tensors are in the host's memory: no number here says anything about a GPU.\n\n"
    lines = ["| stage | about | outcome | seconds |", "|---|---|---|---|"]
    for each in outcomes:
        outcome = each.state + (f": {each.why}" if each.why else "")
        lines.append(f"| {each.name} | {each.about} | {outcome} | {each.seconds:.0f} |")
    details = [text for each in outcomes if (text := _describe(each))]
    return (
        f"{title}{note}{len(outcomes)} stages: {verdict}.\n\n" + "\n".join(lines) + "\n\n" + "\n\n".join(details) + "\n"
    )


def _describe(outcome: Outcome) -> str:
    if outcome.state == "not run":
        return ""
    parts = [f"## {outcome.name}"]
    if outcome.result is not None:
        parts.append(_SHOW[outcome.kind](outcome.result))
    if outcome.tail:
        parts.append("\n".join(["```text", *outcome.tail, "```"]))
    return "\n\n".join(parts)


def _show_tests(tests: Sequence[dict[str, Any]]) -> str:
    lines = ["| test | outcome | seconds |", "|---|---|---|"]
    for test in tests:
        message = f": {test['message']}" if test["message"] else ""
        lines.append(f"| {test['name']} | {test['outcome']}{message} | {test['seconds']:.1f} |")
    return "\n".join(lines)


def _show_bench(document: dict[str, Any]) -> str:
    lines = ["| work | peer | median | ratio to hvdkit |", "|---|---|---|---|"]
    ours = {row["work"]: row["median_s"] for row in document["rows"] if row["peer"] == "hvdkit"}
    for row in document["rows"]:
        base = ours.get(row["work"])
        ratio = f"x{row['median_s'] / base:.2f}" if base else ""
        lines.append(f"| {row['work']} | {row['peer']} | {1e3 * row['median_s']:.3g} ms | {ratio} |")
    notes = [f"- {note}" for note in document.get("notes", [])]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _show_facts(facts: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {_one_line(value)} |" for name, value in facts.items())])


def _one_line(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


_SHOW: dict[str, Callable[[Any], str]] = {"tests": _show_tests, "bench": _show_bench, "facts": _show_facts}
