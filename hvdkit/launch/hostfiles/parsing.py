"""Parse lists of hosts from -H and from files, in a given dialect or in a recognised one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hvdkit.errors import HostfileError, LaunchError
from hvdkit.launch.hostfiles.dialects import DIALECTS, Dialect, find_dialect
from hvdkit.launch.hostfiles.grammars import Reading, parse_numbered, read_lines
from hvdkit.launch.hostfiles.names import FoundHosts, Host, complete_slots, format_hosts, merge_hosts, split_list

#: Recognise the dialect from the text.
AUTO = "auto"

_MOST_PROBLEMS = 100  # more would hide the first problems of a file that is no hostfile


def parse_host_list(text: str, default_slots: int | None = 1) -> tuple[Host, ...]:
    """Parse `-H`: host:slots,host,user@host:slots,[IPv6]:slots,nid[001-004]:slots; repeated hosts add up.

    Raises LaunchError with every problem.
    """
    parts = enumerate(part.strip() for part in split_list(text))
    reading = read_lines(parts, parse_numbered, lambda hosts: merge_hosts(complete_slots(hosts, default_slots)))
    if reading.problems:
        problems = "; ".join(problem for _, problem in reading.problems)
        raise LaunchError(f"-H {text!r}: {problems}. Write it like -H node1:4,node2:4.", code="hosts-invalid")
    return reading.hosts


def parse_hostfile(text: str, path: str, format: str = AUTO, slots: int | None = None) -> FoundHosts:
    """Parse a list of hosts; hostfiles/README.md has the grammars.

    text: of the file.
    path: for the messages.
    format: a name in DIALECTS, or AUTO.
    slots: for hosts without slots in the text, in place of the dialect's own default.

    Raises HostfileError with every problem of the file.
    """
    note = ""
    if format == AUTO:
        dialect, reading, note = recognise(text, slots)
    else:
        dialect = find_dialect(format)
        reading = dialect.parse(text)
    _check(reading, path, dialect, guessed=format == AUTO)
    notes = tuple(f"{path}: {each}" for each in (note, *reading.notes) if each)
    return FoundHosts(complete_slots(reading.hosts, slots or dialect.default_slots), f"{path} ({dialect.title})", notes)


def find_hostfile(path: str, format: str = AUTO, slots: int | None = None) -> FoundHosts:
    """Read and parse a hostfile; see `parse_hostfile`."""
    return parse_hostfile(read_text(path), path, format, slots)


def read_text(path: str) -> str:
    """Read a text file. Raises HostfileError for any other file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HostfileError(path, [f" is not a text file ({error.reason} at byte {error.start})"]) from None
    except ValueError as error:
        raise HostfileError(path, [f" cannot be read: {error}"]) from None
    except OSError as error:
        raise HostfileError(path, [f" cannot be read: {error.strerror}. Check the path"]) from None


def recognise(text: str, slots: int | None = None) -> tuple[Dialect, Reading, str]:
    """Read a text in the first dialect without problems, or else in the dialect with problems in the fewest lines.

    slots: the user's number for hosts without slots.
    Returns the dialect, its reading, and a note if another dialect reads the text differently without problems, or "".
    """
    readings = [(dialect, dialect.parse(text)) for dialect in DIALECTS.values() if dialect.could_be(text)]
    valid = [(dialect, reading) for dialect, reading in readings if reading.hosts and not reading.problems]
    if not valid:
        return *min(readings, key=_misfit), ""
    settled = [(dialect, complete_slots(reading.hosts, slots or dialect.default_slots)) for dialect, reading in valid]
    return *valid[0], _describe_ambiguity(*settled[0], settled[1:])


def _misfit(candidate: tuple[Dialect, Reading]) -> tuple[int, bool]:
    """Return the sort key of a reading: its number of lines with problems; ties go to the most common dialect."""
    dialect, reading = candidate
    return len({line for line, _ in reading.problems}), dialect.name != "openmpi"


def _describe_ambiguity(
    chosen: Dialect, hosts: tuple[Host, ...], others: Sequence[tuple[Dialect, tuple[Host, ...]]]
) -> str:
    groups: dict[tuple[Host, ...], list[Dialect]] = {}
    for dialect, different in others:
        if different != hosts:
            groups.setdefault(different, []).append(dialect)
    if not groups:
        return ""
    names = [chosen.name, *(group[0].name for group in groups.values())]
    readings = "; ".join(
        f"{_join(dialect.title for dialect in group)} would read {format_hosts(different, 3)}: {group[0].rule}"
        for different, group in groups.items()
    )
    return (
        f"read in the format of {chosen.title} as {format_hosts(hosts, 3)}: {chosen.rule}. {readings}. "
        f"Select the format with --hostfile-format {'|'.join(names)}, or set the slots with --slots-per-host."
    )


def _check(reading: Reading, path: str, dialect: Dialect, guessed: bool) -> None:
    problems = [f"{line}: {why}" for line, why in reading.problems[:_MOST_PROBLEMS]]
    if len(reading.problems) > len(problems):
        problems.append(f" has {len(reading.problems) - len(problems)} more problems. Check that it is a hostfile")
    if problems and guessed:
        problems.append(
            f" was read in the format of {dialect.title} ({dialect.sample!r}), which fits most lines. For another "
            "format use --hostfile-format"
        )
    if not problems and not reading.hosts:
        problems.append(
            f" has no hosts. Write one host per line, like: {'node1 slots=4' if guessed else dialect.sample}"
        )
    if problems:
        raise HostfileError(path, problems)


def _join(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
