"""Intel MPI's two files: -hostfile has names only, -machinefile has node1:4."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.horovod import parse_part
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import parse_hosts
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse_hostfile(text: str) -> Reading:
    """Read the file for Intel's -hostfile (-f), where a repeated name counts once."""
    return read_lines(content_lines(text), _parse_name, merge=_keep_first)


def parse_machinefile(text: str) -> Reading:
    """Read the file for Intel's -machinefile."""
    return read_lines(content_lines(text), parse_part)


def write_hostfile(hosts: Sequence[Host]) -> str:
    """Write the file for Intel's -hostfile."""
    return "".join(f"{host.name}\n" for host in hosts)


def write_machinefile(hosts: Sequence[Host]) -> str:
    """Write the file for Intel's -machinefile."""
    return "".join(f"{host.name}:{host.slots}\n" for host in hosts)


def _parse_name(content: str) -> list[Host]:
    if content.count(":") == 1:
        raise ValueError(
            f"{content!r} has a number, which Intel's -hostfile does not take. As its -machinefile it would do: "
            "--hostfile-format machinefile"
        )
    return parse_hosts(content)


def _keep_first(hosts: Iterable[Host]) -> tuple[Host, ...]:
    return tuple({host.login: host for host in hosts}.values())


INTEL = Dialect(
    name="intel",
    title="Intel MPI's -hostfile",
    parse=parse_hostfile,
    write=write_hostfile,
    unsaid=None,
    rule="a host runs as many ranks as it has cores (-ppn says otherwise), and a repeated host counts once",
    carries=frozenset({"ipv6"}),
)

MACHINEFILE = Dialect(
    name="machinefile",
    title="Intel MPI's -machinefile",
    parse=parse_machinefile,
    write=write_machinefile,
    unsaid=1,
    rule="a host without a number runs one rank",
)
