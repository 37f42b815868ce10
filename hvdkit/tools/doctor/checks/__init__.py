"""What is judged: functions from facts to findings, a file a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdkit.tools.doctor.checks.accelerators import check_accelerators
from hvdkit.tools.doctor.checks.horovod import check_horovod
from hvdkit.tools.doctor.checks.mpi import check_mpi
from hvdkit.tools.doctor.checks.packages import check_packages
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding, sort_findings

#: Those of one host.
CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_packages,
    check_mpi,
    check_horovod,
    check_accelerators,
)


def check_host(facts: Facts) -> list[Finding]:
    """Find everything that is wrong on a host, the worst first."""
    return sort_findings(finding for check in CHECKS for finding in check(facts))
