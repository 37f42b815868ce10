"""What is wrong and the cure, and the job that is asked about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hvdkit.tools.doctor.collect.script import ScriptFacts

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

    @classmethod
    def error(cls, name: str, seen: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Make one of this severity."""
        return cls("error", name, seen, cure, hosts)

    @classmethod
    def warning(cls, name: str, seen: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Make one of this severity."""
        return cls("warning", name, seen, cure, hosts)

    @classmethod
    def note(cls, name: str, seen: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Make one of this severity."""
        return cls("note", name, seen, cure, hosts)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, the worst first; otherwise the order stays."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return 1 if there are errors, or with `strict` warnings, else 0; 2 is for a wrong command line."""
    return int(any(finding.severity == "error" or (strict and finding.severity == "warning") for finding in findings))


@dataclass(frozen=True)
class JobRequest:
    """hosts: how many. ranks: of all hosts, as requested; 0 if unknown. slots: of all hosts; 0 if unknown.

    ranks_here: that this host would get; 0 if unknown.
    """

    hosts: int = 1
    ranks: int = 0
    slots: int = 0
    ranks_here: int = 0
    script: ScriptFacts | None = None
