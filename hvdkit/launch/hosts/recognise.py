"""Which dialect a text is in, when nobody says."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.formats import DIALECTS
from hvdkit.launch.hosts.host import Host, format_hosts, settle_slots
from hvdkit.launch.hosts.openmpi import OPENMPI
from hvdkit.launch.hosts.reading import Reading, join_words


def recognise(text: str, slots: int | None = None) -> tuple[Dialect, Reading, str]:
    """Read a text in the first dialect that understands all of it, or else in the one that understands most lines.

    slots: what the user gives to hosts without slots.
    Returns the dialect, its reading, and a note if another dialect understands it all too, but otherwise; else "".
    """
    readings = [(dialect, dialect.parse(text)) for dialect in DIALECTS.values() if dialect.could_be(text)]
    whole = [(dialect, reading) for dialect, reading in readings if reading.hosts and not reading.problems]
    if not whole:
        return *min(readings, key=_misfit), ""
    settled = [(dialect, settle_slots(reading.hosts, slots or dialect.unsaid)) for dialect, reading in whole]
    return *whole[0], _compare(*settled[0], settled[1:])


def _misfit(candidate: tuple[Dialect, Reading]) -> tuple[int, bool]:
    """In how many lines a reading fails; where it is the same in all dialects the user hears of the commonest."""
    dialect, reading = candidate
    return len({line for line, _ in reading.problems}), dialect is not OPENMPI


def _compare(chosen: Dialect, hosts: tuple[Host, ...], others: Sequence[tuple[Dialect, tuple[Host, ...]]]) -> str:
    otherwise: dict[tuple[Host, ...], list[Dialect]] = {}
    for dialect, different in others:
        if different != hosts:
            otherwise.setdefault(different, []).append(dialect)
    if not otherwise:
        return ""
    names = [chosen.name, *(group[0].name for group in otherwise.values())]
    readings = "; ".join(
        f"{join_words(dialect.title for dialect in group)} would read {format_hosts(different, 3)}: {group[0].rule}"
        for different, group in otherwise.items()
    )
    return (
        f"read as {chosen.title}'s, as {format_hosts(hosts, 3)}: {chosen.rule}. {readings}. "
        f"Say which with --hostfile-format {'|'.join(names)}, or how many ranks a host with --slots-per-host."
    )
