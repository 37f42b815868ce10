"""Write hosts in a dialect, or say what cannot be written in it."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.host import Host


def convert(hosts: Sequence[Host], dialect: Dialect) -> tuple[str, tuple[str, ...]]:
    """Write hosts in a dialect; returns the text, and notes of what is left out of it because it only limits.

    Raises LaunchError with everything that the dialect cannot say and that would make another job of it.
    """
    problems = _find_problems(hosts, dialect)
    if problems:
        raise LaunchError(f"This cannot be written for {dialect.title}: {'; '.join(problems)}.")
    notes = []
    limited = [host.name for host in hosts if host.max_slots is not None]
    if limited and "max_slots" not in dialect.carries:
        notes.append(f"max_slots of {', '.join(limited)} is left out: {dialect.title} has no place for it.")
    counts = {host.slots for host in hosts if host.slots is not None}
    if counts and "slots" not in dialect.carries:
        notes.append(
            f"{dialect.title} has no place for slots. Start with -ppn {counts.pop()}."
            if len(counts) == 1
            else f"{dialect.title} has no place for slots, and the hosts differ in them. --to machinefile has one."
        )
    return dialect.write(hosts), tuple(notes)


def _find_problems(hosts: Sequence[Host], dialect: Dialect) -> list[str]:
    problems = []
    users = [host.login for host in hosts if host.user]
    if users and "user" not in dialect.carries:
        problems.append(
            f"it has no place for the user of {', '.join(users)} (write 'User NAME' for that host in ~/.ssh/config, "
            "and leave it out here)"
        )
    addresses = [host.name for host in hosts if ":" in host.name]
    if addresses and "ipv6" not in dialect.carries:
        problems.append(f"it cannot have the IPv6 address {', '.join(addresses)} (use the host's name)")
    bare = [host.name for host in hosts if host.slots is None]
    if bare and dialect.unsaid is not None:
        problems.append(f"it wants the slots of {', '.join(bare)} (say --slots-per-host N)")
    return problems
