"""The steps of doctor: collect facts, evaluate them by all checks, print."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from hvdkit.config import read_environment
from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.launch.detect.hosts import find_hosts
from hvdkit.launch.detect.mpi import choose_home
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.prepare import read_ssh_options
from hvdkit.tools.doctor.checks import affinity, gpus, machine, mpi, network, software
from hvdkit.tools.doctor.checks.job import check_scheduler, check_script, check_small_job, check_variables
from hvdkit.tools.doctor.collect.host import collect
from hvdkit.tools.doctor.collect.script import read_script
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest, exit_code, sort_findings
from hvdkit.tools.doctor.hosts.session import with_own_folder
from hvdkit.tools.doctor.hosts.surveyor import Surveyor, time_allreduce
from hvdkit.tools.doctor.options import DoctorOptions
from hvdkit.tools.doctor.report import (
    build_document,
    build_survey_document,
    describe_small_job,
    print_host_tables,
    print_survey_tables,
    print_verdict,
)
from hvdkit.tools.doctor.survey import Survey

Check = Callable[[HostFacts, JobRequest], Iterable[Finding]]

#: Checks of each host.
HOST_CHECKS: tuple[Check, ...] = (
    software.check_packages,
    mpi.check_mpi,
    software.check_horovod,
    gpus.check_accelerators,
    gpus.check_fabric,
    gpus.check_driver,
    gpus.check_nccl,
    affinity.check_gpu_order,
    machine.check_machine,
    network.check_names,
    network.check_interfaces,
)
#: Checks of the job, on the host that starts it.
JOB_CHECKS: tuple[Check, ...] = (check_scheduler, mpi.check_srun, check_variables, check_script)


def check_host(facts: HostFacts, job: JobRequest | None = None) -> list[Finding]:
    """Find all problems of a host and of the job, the worst first."""
    return find((*HOST_CHECKS, *JOB_CHECKS, affinity.check_task), facts, job or JobRequest())


def find(checks: Iterable[Check], facts: HostFacts, job: JobRequest) -> list[Finding]:
    """Run some checks; returns the findings, the worst first."""
    return sort_findings(finding for check in checks for finding in check(facts, job))


SURVEY_CHECKS: tuple[Callable[[Survey], Iterable[Finding]], ...] = (
    network.check_answers,
    network.check_hostnames,
    network.check_lookups,
    network.check_reach,
    network.check_chosen_interfaces,
    network.check_speed,
    software.check_versions,
    software.check_clocks,
    check_small_job,
    gpus.check_uneven_hosts,
)


def evaluate(survey: Survey, job: JobRequest) -> list[Finding]:
    """Find all problems, the worst first; equal findings on several hosts become one."""
    findings = [finding for check in SURVEY_CHECKS for finding in check(survey)]
    findings += find(JOB_CHECKS, survey.here, job)
    slots = {host.name: host.slots for host in survey.hosts}
    for name, facts in survey.answering.items():
        here = replace(job, ranks_here=slots[name])
        findings += [replace(finding, hosts=(name,)) for finding in find(HOST_CHECKS, facts, here)]
    return sort_findings(merge(findings))


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that are equal except for their hosts."""
    merged: dict[tuple[str, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.severity, finding.name, finding.seen, finding.cure)
        before = merged.get(key)
        hosts = dict.fromkeys([*(before.hosts if before else ()), *finding.hosts])
        merged[key] = replace(finding, hosts=tuple(hosts))
    return list(merged.values())


def diagnose(options: DoctorOptions) -> int:
    """Examine the hosts that are named or allocated, or this one; returns the exit code."""
    environ = read_environment()
    environ = {**choose_home(environ), **environ}  # as hvdrun does
    found = None
    if not options.here:
        found = find_hosts(options.hosts, options.hostfile, environ, format=options.hostfile_format)
    hosts = found.hosts if found else ()
    slots = sum(host.slots or 0 for host in hosts) if all(host.slots for host in hosts) else 0
    script = read_script(options.script) if options.script else None
    job = JobRequest(hosts=max(1, len(hosts)), ranks=options.ranks, slots=slots, script=script)
    if hosts:
        return _diagnose_hosts(options, hosts, job, environ)
    return _diagnose_this_host(options, job, environ)


def _diagnose_this_host(options: DoctorOptions, job: JobRequest, environ: Mapping[str, str]) -> int:
    with _show_progress(options) as progress:
        progress("collecting facts on this host")
        facts = collect(environ)
    findings = check_host(facts, replace(job, ranks_here=job.ranks))
    if options.json:
        return _print_json(build_document(facts, findings, code=exit_code(findings, strict=options.strict)))
    return _print_report(options, findings, lambda console: print_host_tables(facts, console))


def _diagnose_hosts(options: DoctorOptions, hosts: Sequence[Host], job: JobRequest, environ: Mapping[str, str]) -> int:
    environ = with_own_folder(environ)
    via = options.via
    if via == "auto":
        named = options.hosts is not None or options.hostfile is not None
        via = "srun" if find_scheduler(environ) == "slurm" and not named else "ssh"
    with _show_progress(options) as progress:
        ssh = read_ssh_options(options.ssh_port, options.ssh_identity_file)
        survey = asyncio.run(Surveyor(hosts, environ, via, ssh, progress).run())
        if not options.no_allreduce and all(host.facts is not None for host in survey.hosts):
            progress("timing an allreduce over all hosts")
            survey = replace(survey, allreduce=time_allreduce(hosts, environ, survey))
    findings = evaluate(survey, job)
    if options.json:
        return _print_json(build_survey_document(survey, findings, code=exit_code(findings, strict=options.strict)))
    summary = describe_small_job(survey)
    return _print_report(options, findings, lambda console: print_survey_tables(survey, console), summary)


def _print_json(document: dict[str, Any]) -> int:
    json.dump(document, sys.stdout, indent=2)
    print()
    return int(document["exit_code"])


def _print_report(
    options: DoctorOptions, findings: Sequence[Finding], print_tables: Callable[[Console], None], summary: str = ""
) -> int:
    console = Console()
    print_verdict(findings, console, quiet=options.quiet)
    if not options.quiet:
        if summary:
            console.print(summary, highlight=False)
        if options.verbose:
            print_tables(console)
        else:
            console.print("hvdkit doctor --verbose prints all that was found.", highlight=False)
    return exit_code(findings, strict=options.strict)


@contextlib.contextmanager
def _show_progress(options: DoctorOptions) -> Iterator[Callable[[str], object]]:
    """Show the current step on a terminal."""
    console = Console(stderr=True)
    if options.json or options.quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("doctor") as status:
        yield lambda text: status.update(f"doctor: {text}")
