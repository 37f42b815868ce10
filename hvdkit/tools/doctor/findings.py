"""Findings of doctor, with the cure, and the job that the checks are about."""

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
    """A problem, or a fact worth knowing.

    severity: "error": a job fails or computes a wrong result. "warning": it may, or is slow. "note": no harm.
    name: the check's stable identifier, the same in every release: "shm-small".
    seen: what was found, a sentence or more.
    cure: what to do, a sentence or more.
    hosts: the hosts concerned; () is this machine.
    """

    severity: Severity
    name: str
    seen: str
    cure: str
    hosts: tuple[str, ...] = ()

    @classmethod
    def error(cls, name: str, seen: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Make a finding of this severity."""
        return cls("error", name, seen, cure, hosts)

    @classmethod
    def warning(cls, name: str, seen: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Make a finding of this severity."""
        return cls("warning", name, seen, cure, hosts)

    @classmethod
    def note(cls, name: str, seen: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
        """Make a finding of this severity."""
        return cls("note", name, seen, cure, hosts)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, the worst first; the order is otherwise unchanged."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return 1 if there are errors, or with `strict` warnings, else 0; 2 is for a wrong command line."""
    return int(any(finding.severity == "error" or (strict and finding.severity == "warning") for finding in findings))


@dataclass(frozen=True)
class JobRequest:
    """The job that the checks are about.

    hosts: number of hosts.
    ranks: number of ranks on all hosts, as requested; 0 if unknown.
    slots: number of slots on all hosts; 0 if unknown.
    ranks_here: number of ranks for this host; 0 if unknown.
    script: facts about the training script; None without one.
    """

    hosts: int = 1
    ranks: int = 0
    slots: int = 0
    ranks_here: int = 0
    script: ScriptFacts | None = None
