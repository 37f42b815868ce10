"""What hosts call themselves, and what their names lead to on the others."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from hvdkit.tools.doctor.checks.names import are_loopback
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.hosts.networks import addresses_of
from hvdkit.tools.doctor.hosts.seen import Survey


def check_hostnames(survey: Survey) -> Iterator[Finding]:
    """Find hosts that are one, or call themselves the same."""
    known: dict[str, list[str]] = defaultdict(list)
    for name, facts in survey.answering:
        known[facts.host].append(name)
    addresses = {
        name: {each.address for each in facts.machine.network.interfaces if not each.loopback and not each.bridge}
        for name, facts in survey.answering
    }
    for name, facts in survey.answering:
        listed = name.rpartition("@")[2]
        alone = len(known[facts.host]) == 1  # else there is a worse finding
        if alone and listed != "localhost" and not _is_address(listed) and _short(facts.host) != _short(listed):
            yield Finding(
                "note",
                "hostname-differs",
                f"{listed} calls itself {facts.host}: what compares names (torchrun's rendezvous, Slurm) takes them "
                "for two hosts.",
                "List it by the name that hostname prints there.",
                (name,),
            )
    for hostname, names in known.items():
        if len(names) < 2:
            continue
        if all(addresses[name] == addresses[names[0]] for name in names):
            yield Finding(
                "error",
                "host-twice",
                f"{' and '.join(names)} are the same host, {hostname}.",
                "Leave one of them out, and give the other their slots together.",
                tuple(names),
            )
        else:
            yield Finding(
                "error",
                "hostname-twice",
                f"{' and '.join(names)} both call themselves {hostname}: MPI and NCCL take their ranks for those of "
                "one host, and look for shared memory that is not there.",
                "Give each host a name of its own (hostnamectl set-hostname), or each container (--hostname).",
                tuple(names),
            )


def check_lookups(survey: Survey) -> Iterator[Finding]:
    """Judge what each host's name leads to on the others."""
    answering = dict(survey.answering)
    for target in answering:
        name = target.rpartition("@")[2]
        found = {each.source: each.addresses for each in survey.lookups if each.name == name and each.source != target}
        unknown = [source for source, addresses in found.items() if not addresses]
        if unknown:
            yield Finding(
                "error",
                "name-unknown",
                f"The name {name} leads to no address on {', '.join(unknown)}.",
                f"Put {name} into DNS, or the same /etc/hosts on every host.",
                tuple(unknown),
            )
        looped = [source for source, addresses in found.items() if addresses and are_loopback(addresses)]
        if looped:
            yield Finding(
                "error",
                "name-loopback",
                f"The name {name} leads to {found[looped[0]][0]} on {', '.join(looped)}, which is that host itself.",
                f"Correct {name} in /etc/hosts of {', '.join(looped)}.",
                tuple(looped),
            )
    yield from _check_master(survey)


def _check_master(survey: Survey) -> Iterator[Finding]:
    name = survey.here.environ.get("MASTER_ADDR", "")
    answering = dict(survey.answering)
    if not name or len(answering) < 2:
        return
    for each in survey.lookups:
        if each.name != name or each.source not in answering:
            continue
        if not each.addresses:
            yield Finding(
                "error",
                "master-address",
                f"MASTER_ADDR={name} leads to no address on {each.source}.",
                "Set it to the name of the job's first host, as the others know it.",
                (each.source,),
            )
            return
        if not are_loopback(each.addresses) and not any(
            address in addresses_of(facts) for facts in answering.values() for address in each.addresses
        ):
            yield Finding(
                "error",
                "master-address",
                f"MASTER_ADDR={name} leads to {each.addresses[0]}, which is none of the job's hosts: the login host, "
                "perhaps (SLURM_LAUNCH_NODE_IPADDR).",
                "Set it to the name of the job's first host.",
                (each.source,),
            )
            return


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
