"""What is judged: functions from facts to findings, a file a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdkit.tools.doctor.checks.accelerators import check_accelerators
from hvdkit.tools.doctor.checks.fabric import check_fabric
from hvdkit.tools.doctor.checks.horovod import check_horovod
from hvdkit.tools.doctor.checks.interfaces import check_interfaces
from hvdkit.tools.doctor.checks.machine import check_machine
from hvdkit.tools.doctor.checks.mpi import check_mpi, check_srun
from hvdkit.tools.doctor.checks.names import check_names
from hvdkit.tools.doctor.checks.packages import check_packages
from hvdkit.tools.doctor.checks.scheduler import check_scheduler
from hvdkit.tools.doctor.checks.script import check_script
from hvdkit.tools.doctor.checks.variables import check_variables
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding, sort_findings
from hvdkit.tools.doctor.job import Job

Check = Callable[[Facts, Job], Iterable[Finding]]

#: Of each host.
HOST_CHECKS: tuple[Check, ...] = (
    check_packages,
    check_mpi,
    check_horovod,
    check_accelerators,
    check_fabric,
    check_machine,
    check_names,
    check_interfaces,
)
#: Of the job, on the host that it is started from.
JOB_CHECKS: tuple[Check, ...] = (check_scheduler, check_srun, check_variables, check_script)


def check_host(facts: Facts, job: Job | None = None) -> list[Finding]:
    """Find everything that is wrong on a host and with the job, the worst first."""
    return find(HOST_CHECKS + JOB_CHECKS, facts, job or Job())


def find(checks: Iterable[Check], facts: Facts, job: Job) -> list[Finding]:
    """Run some checks; the worst findings stand first."""
    return sort_findings(finding for check in checks for finding in check(facts, job))
