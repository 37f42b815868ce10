"""All findings of a survey."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hvdkit.tools.doctor.checks import HOST_CHECKS, JOB_CHECKS, find
from hvdkit.tools.doctor.checks.alike import check_alike, check_clocks
from hvdkit.tools.doctor.checks.between import check_answers, check_reach, check_speed
from hvdkit.tools.doctor.checks.between_interfaces import check_chosen_interfaces
from hvdkit.tools.doctor.checks.between_names import check_hostnames, check_lookups
from hvdkit.tools.doctor.checks.small_job import check_small_job
from hvdkit.tools.doctor.finding import Finding, sort_findings
from hvdkit.tools.doctor.hosts.seen import Survey
from hvdkit.tools.doctor.job import Job

SURVEY_CHECKS: tuple[Callable[[Survey], Iterable[Finding]], ...] = (
    check_answers,
    check_hostnames,
    check_lookups,
    check_reach,
    check_chosen_interfaces,
    check_speed,
    check_alike,
    check_clocks,
    check_small_job,
)


def judge(survey: Survey, job: Job) -> list[Finding]:
    """Find everything that is wrong, the worst first; what is the same on several hosts is one finding."""
    findings = [finding for check in SURVEY_CHECKS for finding in check(survey)]
    findings += find(JOB_CHECKS, survey.here, job)
    slots = {host.name: host.slots for host in survey.hosts}
    for name, facts in survey.answering:
        here = replace(job, ranks_here=slots[name])
        findings += [replace(finding, hosts=(name,)) for finding in find(HOST_CHECKS, facts, here)]
    return sort_findings(merge(findings))


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Make one finding of those that say the same of different hosts."""
    merged: dict[tuple[str, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.severity, finding.name, finding.seen, finding.cure)
        before = merged.get(key)
        hosts = dict.fromkeys([*(before.hosts if before else ()), *finding.hosts])
        merged[key] = replace(finding, hosts=tuple(hosts))
    return list(merged.values())
