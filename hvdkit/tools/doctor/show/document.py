"""What doctor prints for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hvdkit.tools.doctor.checks.abilities import assess_engines, assess_transports, list_choices
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import SEVERITIES, Finding, exit_code
from hvdkit.tools.doctor.survey import Survey


def build_document(facts: HostFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Build what --json prints: facts, abilities, choices, findings, and how many there are of each severity."""
    return {
        "facts": asdict(facts),
        "engines": _list(assess_engines(facts)),
        "transports": _list(assess_transports(facts)),
        "choices": _list(list_choices(facts)),
        **_conclude(findings),
    }


def build_survey_document(survey: Survey, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same of several hosts: what was seen of each and between them, then findings."""
    return {**asdict(survey), **_conclude(findings)}


def _conclude(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "findings": _list(findings),
        "counts": {name: sum(finding.severity == name for finding in findings) for name in SEVERITIES},
        "exit_code": exit_code(findings),
    }


def _list(items: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]
