"""Checks of what must be the same on all hosts: versions and clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from hvdkit.tools.doctor.collect.software import framework_versions
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, Severity
from hvdkit.tools.doctor.survey import Survey

#: Clocks further apart than this many seconds make timelines and logs hard to read, and make rebuild what is new.
_CLOCK_S = 1.0
_MISSING = "not installed"


def check_versions(survey: Survey) -> Iterator[Finding]:
    """Compare the versions of packages that must be the same."""
    versions = {name: _list_versions(facts) for name, facts in survey.answering.items()}
    for subject in dict.fromkeys(subject for found in versions.values() for subject in found):
        groups: dict[str, list[str]] = defaultdict(list)
        for name, found in versions.items():
            groups[found.get(subject, _MISSING)].append(name)
        if len(groups) > 1:
            yield _report_difference(subject, groups)


def check_clocks(survey: Survey) -> Iterator[Finding]:
    """Compare the hosts' clocks with this host's."""
    for host in survey.hosts:
        if host.facts is not None and abs(host.offset_s) - host.error_s > _CLOCK_S:
            ahead = "ahead of" if host.offset_s > 0 else "behind"
            yield Finding(
                "warning",
                "clock-differs",
                f"The clock of {host.name} is {abs(host.offset_s):.1f} s {ahead} this host's.",
                "Synchronize the clocks of all hosts (chronyd or ntpd).",
                (host.name,),
            )


def _list_versions(facts: HostFacts) -> dict[str, str]:
    found = {"Python": facts.python, "hvdkit": facts.hvdkit, **framework_versions(facts.packages)}
    for subject in ("mpi4py", "numpy"):
        found[subject] = facts.packages.get(subject, _MISSING)
    found["MPI"] = facts.mpi.name or _MISSING
    found["NCCL"] = facts.accelerators.nccl or _MISSING
    found["Horovod"] = facts.horovod.version or _MISSING
    found["the GPU driver"] = facts.accelerators.driver or _MISSING
    if "keras" in facts.packages:
        found["Keras's backend"] = facts.keras_backend
    return found


def _report_difference(subject: str, groups: Mapping[str, list[str]]) -> Finding:
    most = max(groups, key=lambda version: len(groups[version]))
    odd = tuple(name for version, names in groups.items() if version != most for name in names)
    seen = "; ".join(f"{version} on {', '.join(names)}" for version, names in groups.items())
    cure = "Install the same version on every host, best in one environment on a file system that all hosts share."
    return Finding(
        _severity(subject, groups), "versions", f"{subject} is not the same on all hosts: {seen}.", cure, odd
    )


def _severity(subject: str, versions: Mapping[str, list[str]]) -> Severity:
    if subject == "the GPU driver":
        return "note" if _MISSING not in versions else "warning"
    if subject == "Python":  # pickled objects travel between ranks of 3.11.x, not always between 3.11 and 3.12
        return "error" if len({version.rpartition(".")[0] for version in versions}) > 1 else "warning"
    return "warning" if subject == "numpy" else "error"
