"""The steps of doctor: collect facts, evaluate them, print."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from hvdkit.config import read_environment
from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.launch.cli.launcher_options import read_ssh_options
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.resolve_hosts import find_hosts
from hvdkit.tools.doctor.collect.host import collect
from hvdkit.tools.doctor.collect.script import read_script
from hvdkit.tools.doctor.evaluate import check_host, evaluate
from hvdkit.tools.doctor.findings import Finding, JobRequest, exit_code
from hvdkit.tools.doctor.hosts.allreduce import time_allreduce
from hvdkit.tools.doctor.hosts.session import with_own_folder
from hvdkit.tools.doctor.hosts.surveyor import Surveyor
from hvdkit.tools.doctor.report import (
    build_document,
    build_survey_document,
    describe_small_job,
    print_host_tables,
    print_survey_tables,
    print_verdict,
)


def diagnose(options: argparse.Namespace) -> int:
    """Examine the hosts that are named or allocated, or this one; returns the exit code."""
    environ = read_environment()
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


def _diagnose_this_host(options: argparse.Namespace, job: JobRequest, environ: Mapping[str, str]) -> int:
    with _show_progress(options) as progress:
        progress("collecting facts on this host")
        facts = collect(environ)
    findings = check_host(facts, replace(job, ranks_here=job.ranks))
    if options.json:
        return _print_json(build_document(facts, findings), findings)
    return _print_report(options, findings, lambda console: print_host_tables(facts, console))


def _diagnose_hosts(
    options: argparse.Namespace, hosts: Sequence[Host], job: JobRequest, environ: Mapping[str, str]
) -> int:
    environ = with_own_folder(environ)
    via = options.via
    if via == "auto":
        named = options.hosts is not None or options.hostfile is not None
        via = "srun" if find_scheduler(environ) == "slurm" and not named else "ssh"
    with _show_progress(options) as progress:
        survey = Surveyor(hosts, environ, via, read_ssh_options(options), progress).run()
        if not options.no_allreduce and all(host.facts is not None for host in survey.hosts):
            progress("timing an allreduce over all hosts")
            survey = replace(survey, allreduce=time_allreduce(hosts, environ, survey))
    findings = evaluate(survey, job)
    if options.json:
        return _print_json(build_survey_document(survey, findings), findings)
    summary = describe_small_job(survey)
    return _print_report(options, findings, lambda console: print_survey_tables(survey, console), summary)


def _print_json(document: dict[str, Any], findings: Sequence[Finding]) -> int:
    json.dump(document, sys.stdout, indent=2)
    print()
    return exit_code(findings)


def _print_report(
    options: argparse.Namespace, findings: Sequence[Finding], print_tables: Callable[[Console], None], summary: str = ""
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
    return exit_code(findings)


@contextlib.contextmanager
def _show_progress(options: argparse.Namespace) -> Iterator[Callable[[str], object]]:
    """Show on a terminal what is being done."""
    console = Console(stderr=True)
    if options.json or options.quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("doctor") as status:
        yield lambda text: status.update(f"doctor: {text}")
