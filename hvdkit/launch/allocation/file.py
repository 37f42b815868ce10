"""An allocation that is in a file."""

from __future__ import annotations

from dataclasses import replace

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.files import parse_hostfile, read_text
from hvdkit.launch.hosts.host import FoundHosts


def read_listed(
    dialect: Dialect, path: str, source: str, slots: int | None, *, more: str = "", once: str = ""
) -> FoundHosts:
    """Read the file of an allocation.

    slots: for every host; None for what the file says.
    once: what to say where the file gives slots to no host; "" for nothing.
    Raises HostfileError with every problem of the file, and for one that cannot be read.
    """
    text = read_text(path)
    found = parse_hostfile(text, path, dialect.name)
    unsaid = all(host.slots is None for host in dialect.parse(text).hosts)
    notes = found.notes
    if slots:
        found = replace(found, hosts=tuple(replace(host, slots=slots) for host in found.hosts))
    elif unsaid and once:
        notes = (*notes, f"{source}: {once}, which is one rank: {more}.")
    return replace(found, source=source, notes=notes, more=more, allocated=True)
