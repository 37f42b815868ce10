"""What the MPI Operator (and Volcano) leaves in a launcher pod: a hostfile, discover_hosts.sh, or what that prints."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.horovod import parse_part
from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.names import parse_list
from hvdkit.launch.hosts.openmpi import parse_keyed
from hvdkit.launch.hosts.reading import Reading, content_lines, read_lines


def parse(text: str) -> Reading:
    """Read names of pods, with slots= or :slots or neither, one a line or with commas, or a script that echoes them."""
    return read_lines(content_lines(text), _parse_line)


def write(hosts: Sequence[Host]) -> str:
    """Write what discover_hosts.sh would print."""
    return "".join(f"{host.name}:{host.slots}\n" for host in hosts)


def _parse_line(content: str) -> list[Host]:
    first, _, rest = content.partition(" ")
    content = rest.strip().strip("'\"") if first == "echo" else content
    if "=" in content:
        return parse_keyed(content, {"slots": "slots"})
    return parse_list(content, parse_part)


def _could_be(text: str) -> bool:
    """Only the script is recognised: the rest is like other dialects, and so mixed that it would excuse mistakes."""
    return any(line.startswith("echo ") for _, line in content_lines(text))


KUBERNETES = Dialect(
    name="kubernetes",
    title="Kubernetes",
    parse=parse,
    write=write,
    unsaid=1,
    rule="a pod without a number runs one rank",
    could_be=_could_be,
)
