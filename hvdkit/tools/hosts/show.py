"""Hosts as a table and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict

from hvdkit.launch.hostfiles import FoundHosts


def write_json(found: FoundHosts) -> str:
    """Write hosts as JSON: source, hosts, ranks and notes; slots null for as many as the host has cores."""
    return (
        json.dumps(
            {
                "source": found.source,
                "hosts": [asdict(host) for host in found.hosts],
                "ranks": found.ranks,
                "notes": found.notes,
            },
            indent=2,
        )
        + "\n"
    )


def write_table(found: FoundHosts) -> str:
    """Write hosts as a table, with their number and that of all slots under it."""
    from rich.box import SIMPLE  # rich takes longer to load than --version takes to answer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    table.add_column("host", no_wrap=True)
    table.add_column("slots", justify="right")
    limited, users = any(host.max_slots for host in found.hosts), any(host.user for host in found.hosts)
    if limited:
        table.add_column("most", justify="right")
    if users:
        table.add_column("user")
    for host in found.hosts:
        row = [host.name, "cores" if host.slots is None else str(host.slots)]
        row += [str(host.max_slots or "")] if limited else []
        row += [host.user] if users else []
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(file=out, width=max(80, *(len(host.name) + 40 for host in found.hosts)))
    console.print(table)
    return f"{found.source}\n{out.getvalue()}{_summarize(found)}\n"


def _summarize(found: FoundHosts) -> str:
    count = f"{len(found.hosts)} host{'s' * (len(found.hosts) != 1)}"
    known = [host.slots for host in found.hosts if host.slots is not None]
    rest = ", and as many as the others have cores" if known else ", as many slots as they have cores"
    slots = f", {sum(known)} slot{'s' * (sum(known) != 1)}" if known else ""
    asked = f"; {found.ranks} ranks were asked for" if found.ranks and found.ranks != sum(known) else ""
    return count + slots + (rest if len(known) < len(found.hosts) else "") + asked


#: Outputs that are not hostfile formats.
SHOWN: dict[str, Callable[[FoundHosts], str]] = {"table": write_table, "json": write_json}
