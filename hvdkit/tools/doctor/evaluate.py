"""All checks, and what they find on one host or in a survey."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hvdkit.tools.doctor.checks import gpus, machine, mpi, names, network, software
from hvdkit.tools.doctor.checks.job import check_scheduler, check_script, check_small_job, check_variables
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest, sort_findings
from hvdkit.tools.doctor.survey import Survey

Check = Callable[[HostFacts, JobRequest], Iterable[Finding]]

#: Of each host.
HOST_CHECKS: tuple[Check, ...] = (
    software.check_packages,
    mpi.check_mpi,
    software.check_horovod,
    gpus.check_accelerators,
    gpus.check_fabric,
    gpus.check_driver,
    gpus.check_nccl,
    machine.check_machine,
    names.check_names,
    network.check_interfaces,
)
#: Of the job, on the host that it is started from.
JOB_CHECKS: tuple[Check, ...] = (check_scheduler, mpi.check_srun, check_variables, check_script)


def check_host(facts: HostFacts, job: JobRequest | None = None) -> list[Finding]:
    """Find everything that is wrong on a host and with the job, the worst first."""
    return find(HOST_CHECKS + JOB_CHECKS, facts, job or JobRequest())


def find(checks: Iterable[Check], facts: HostFacts, job: JobRequest) -> list[Finding]:
    """Run some checks; the worst findings stand first."""
    return sort_findings(finding for check in checks for finding in check(facts, job))


SURVEY_CHECKS: tuple[Callable[[Survey], Iterable[Finding]], ...] = (
    network.check_answers,
    names.check_hostnames,
    names.check_lookups,
    network.check_reach,
    network.check_chosen_interfaces,
    network.check_speed,
    software.check_versions,
    software.check_clocks,
    check_small_job,
    gpus.check_uneven_hosts,
)


def evaluate(survey: Survey, job: JobRequest) -> list[Finding]:
    """Find everything that is wrong, the worst first; what is the same on several hosts is one finding."""
    findings = [finding for check in SURVEY_CHECKS for finding in check(survey)]
    findings += find(JOB_CHECKS, survey.here, job)
    slots = {host.name: host.slots for host in survey.hosts}
    for name, facts in survey.answering.items():
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
