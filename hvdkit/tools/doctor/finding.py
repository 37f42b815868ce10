"""What is wrong, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    severity: error: a job fails or computes something else. warning: it may, or is slow. note: no harm here.
    name: which check found it, the same for every release: "shm-small". seen, cure: a sentence each, or more.
    hosts: where; () is this machine.
    """

    severity: Severity
    name: str
    seen: str
    cure: str
    hosts: tuple[str, ...] = ()


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, the worst first; otherwise the order stays."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if there is nothing but notes, 1 if there are warnings, 2 if there are errors."""
    severities = {finding.severity for finding in findings}
    return 2 if "error" in severities else 1 if "warning" in severities else 0
