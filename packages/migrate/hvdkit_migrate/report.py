"""Reports of a plan, for people and for programs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence

from hvdkit_migrate.detect import KINDS
from hvdkit_migrate.findings import Finding
from hvdkit_migrate.plan import Plan

_TITLES = {
    "break": "to do by hand: without it the script fails or trains wrongly on many ranks",
    "change": "changed",
    "better": "could be better",
}


def write_report(plan: Plan) -> str:
    """Write the findings of a script: a group for each kind, with file:line."""
    lines = [f"{plan.path}: {KINDS[plan.kind]}"]
    for kind, title in _TITLES.items():
        found = plan.of(kind)
        if found:
            lines += ["", f"  {title} ({len(found)})"]
            lines += [f"    {plan.path}:{where}: {what}" for where, what in _folded(found)]
    if not plan.findings:
        lines.append("  nothing to change")
    return "\n".join(lines) + "\n"


def _folded(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return (lines, text) of findings; findings with the same text are merged."""
    lines: dict[str, list[str]] = {}
    for one in findings:
        lines.setdefault(one.what + _instead(one), []).append(str(one.line))
    return [(",".join(dict.fromkeys(numbers)), what) for what, numbers in lines.items()]


def _instead(finding: Finding) -> str:
    return f"\n        write: {finding.write}" if finding.write else ""


def write_diff(plan: Plan) -> str:
    """Write the unified diff; "" if nothing changes."""
    before, after = plan.before.splitlines(keepends=True), plan.after.splitlines(keepends=True)
    return "".join(_ended(difflib.unified_diff(before, after, plan.path, plan.path)))


def _ended(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def write_json(plans: Sequence[Plan]) -> str:
    """Write plans as JSON: for each script path, kind, changed, findings and diff."""
    answers = [
        {
            "path": plan.path,
            "kind": plan.kind,
            "changed": plan.before != plan.after,
            "findings": [
                {"kind": one.kind, "line": one.line, "what": one.what, "write": one.write} for one in plan.findings
            ],
            "diff": write_diff(plan),
        }
        for plan in plans
    ]
    return json.dumps(answers, indent=2) + "\n"
