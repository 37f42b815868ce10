"""Write hosts in a dialect."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles.dialects import Dialect
from hvdkit.launch.hostfiles.host import Host


def convert(hosts: Sequence[Host], dialect: Dialect) -> tuple[str, tuple[str, ...]]:
    """Write hosts in a dialect; returns the text, and notes about limits that it leaves out.

    Raises LaunchError with everything that the dialect cannot express and that would change the job.
    """
    problems = _find_problems(hosts, dialect)
    if problems:
        raise LaunchError(f"These hosts cannot be written in the format of {dialect.title}: {'; '.join(problems)}.")
    notes = []
    limited = [host.name for host in hosts if host.max_slots is not None]
    if limited and "max_slots" not in dialect.carries:
        notes.append(
            f"max_slots of {', '.join(limited)} is left out: the format of {dialect.title} has no field for it."
        )
    counts = {host.slots for host in hosts if host.slots is not None}
    if counts and "slots" not in dialect.carries:
        notes.append(
            f"The format of {dialect.title} has no field for slots. Start with -ppn {counts.pop()}."
            if len(counts) == 1
            else f"The format of {dialect.title} has no field for slots, and the hosts differ in theirs. "
            "Use --to machinefile."
        )
    return dialect.write(hosts), tuple(notes)


def _find_problems(hosts: Sequence[Host], dialect: Dialect) -> list[str]:
    problems = []
    users = [host.login for host in hosts if host.user]
    if users and "user" not in dialect.carries:
        problems.append(
            f"it has no field for the user of {', '.join(users)} (remove the user, and write 'User NAME' for that host "
            "in ~/.ssh/config)"
        )
    addresses = [host.name for host in hosts if ":" in host.name]
    if addresses and "ipv6" not in dialect.carries:
        problems.append(f"it does not allow the IPv6 address {', '.join(addresses)} (use the host's name)")
    bare = [host.name for host in hosts if host.slots is None]
    if bare and dialect.default_slots is not None:
        problems.append(f"it requires the slots of {', '.join(bare)} (use --slots-per-host N)")
    return problems
