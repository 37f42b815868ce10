"""What doctor does, in order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from hvdkit.config import read_environment
from hvdkit.launch.facts import find_scheduler
from hvdkit.launch.hosts import Host
from hvdkit.launch.starter_flags import read_ssh_options
from hvdkit.launch.where import find_hosts
from hvdkit.tools.doctor.checks import check_host
from hvdkit.tools.doctor.finding import Finding, exit_code
from hvdkit.tools.doctor.hosts.allreduce import time_allreduce
from hvdkit.tools.doctor.hosts.judge import judge
from hvdkit.tools.doctor.hosts.start import with_own_folder
from hvdkit.tools.doctor.hosts.survey import Surveyor
from hvdkit.tools.doctor.job import Job
from hvdkit.tools.doctor.look.collect import collect
from hvdkit.tools.doctor.script import read_script
from hvdkit.tools.doctor.show.document import build_document, build_survey_document
from hvdkit.tools.doctor.show.hosts import print_survey
from hvdkit.tools.doctor.show.table import print_report


def carry_out(options: argparse.Namespace) -> int:
    """Look at the hosts that are named or allocated, or at this one; returns the exit code."""
    environ = read_environment()
    found = None
    if not options.here:
        found = find_hosts(options.hosts, options.hostfile, environ, format=options.hostfile_format)
    hosts = found.hosts if found else ()
    slots = sum(host.slots or 0 for host in hosts) if all(host.slots for host in hosts) else 0
    script = read_script(options.script) if options.script else None
    job = Job(hosts=max(1, len(hosts)), ranks=options.ranks, slots=slots, script=script)
    if hosts:
        return _look_at_hosts(options, hosts, job, environ)
    return _look_here(options, job, environ)


def _look_here(options: argparse.Namespace, job: Job, environ: Mapping[str, str]) -> int:
    facts = collect(environ)
    findings = check_host(facts, replace(job, ranks_here=job.ranks))
    return _tell(
        options,
        findings,
        lambda: build_document(facts, findings),
        lambda console: print_report(facts, findings, console),
    )


def _look_at_hosts(options: argparse.Namespace, hosts: Sequence[Host], job: Job, environ: Mapping[str, str]) -> int:
    environ = with_own_folder(environ)
    via = options.via
    if via == "auto":
        named = options.hosts is not None or options.hostfile is not None
        via = "srun" if find_scheduler(environ) == "slurm" and not named else "ssh"
    survey = Surveyor(hosts, environ, via, read_ssh_options(options)).run()
    if not options.no_allreduce and all(host.facts is not None for host in survey.hosts):
        survey = replace(survey, allreduce=time_allreduce(hosts, environ, survey))
    findings = judge(survey, job)
    return _tell(
        options,
        findings,
        lambda: build_survey_document(survey, findings),
        lambda console: print_survey(survey, findings, console),
    )


def _tell(
    options: argparse.Namespace,
    findings: Sequence[Finding],
    build: Callable[[], dict[str, Any]],
    show: Callable[[Console], None],
) -> int:
    if options.json:
        json.dump(build(), sys.stdout, indent=2)
        print()
    else:
        show(Console())
    return exit_code(findings)
