"""What doctor prints of several hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from rich.console import Console

from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.hosts.networks import common_networks, describe_network
from hvdkit.tools.doctor.hosts.seen import Survey
from hvdkit.tools.doctor.look.packages import framework_versions
from hvdkit.tools.doctor.show.table import build_table, print_findings


def print_survey(survey: Survey, findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each host, the ways between them, then findings."""
    titles: tuple[str, ...] = (
        "host",
        "slots",
        "cores",
        "GPUs",
        "Python",
        "frameworks",
        "MPI",
        "/dev/shm free",
        "clock",
    )
    console.print(build_table("hosts", titles, _list_hosts(survey)))
    if len(survey.hosts) > 1:
        titles = ("from", *(host.name for host in survey.hosts))
        console.print(build_table("connections, by name", titles, _list_ways(survey)))
    for network in common_networks(survey):
        console.print(f"shared by all: {describe_network(survey, network)}, {_rate(survey, str(network))}")
    job = survey.allreduce
    if job is not None and not job.error:
        expected = f"; the network should give {job.expected_s * 1e3:.0f} ms" if job.expected_s else ""
        console.print(
            f"{len(job.ranks)} ranks summed {job.bytes / 2**20:.0f} MiB in {job.seconds * 1e3:.0f} ms over "
            f"{job.transport}{expected}"
        )
    console.print(f"looked for {survey.seconds:.1f} s\n")
    print_findings(findings, console)


def _list_hosts(survey: Survey) -> Iterator[tuple[str, ...]]:
    for host in survey.hosts:
        facts = host.facts
        slots = str(host.slots or "?")
        if facts is None:
            yield host.name, slots, "no answer", *[""] * 6
            continue
        machine = facts.machine
        frameworks = ", ".join(f"{name} {version}" for name, version in framework_versions(facts.packages).items())
        yield (
            host.name,
            slots,
            f"{len(machine.cpu.allowed)} of {machine.cpu.cores}",
            str(len(facts.accelerators.gpus) or "-"),
            facts.python,
            frameworks or "-",
            facts.mpi.name or "-",
            f"{machine.shared.free_bytes / 1e9:.1f} GB",
            f"{host.offset_s:+.3f} s",
        )


def _list_ways(survey: Survey) -> Iterator[tuple[str, ...]]:
    for source in survey.hosts:
        cells = []
        for target in survey.hosts:
            ways = [each for each in survey.reaches if (each.source, each.target) == (source.name, target.name)]
            named = [each for each in ways if each.named]
            if source is target:
                cells.append("")
            elif not named:
                cells.append("?")
            elif all(each.problem for each in named):
                cells.append(f"no: {named[0].problem}")
            else:
                speed = max(each.mbit for each in named)
                cells.append(f"{speed:.0f} Mbit/s" if speed else "yes")
        yield source.name, *cells


def _rate(survey: Survey, network: str) -> str:
    known = [
        each.mbit
        for each in survey.reaches
        if each.mbit and ipaddress.ip_address(each.address) in ipaddress.ip_network(network)
    ]
    return f"{min(known):.0f} Mbit/s" if known else "not measured"
