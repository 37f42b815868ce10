"""Host lists in files."""

from __future__ import annotations

from pathlib import Path

from hvdkit.errors import HostfileError
from hvdkit.launch.hosts.formats import AUTO, find_dialect
from hvdkit.launch.hosts.host import FoundHosts, Host, settle_slots
from hvdkit.launch.hosts.reading import Reading
from hvdkit.launch.hosts.recognise import recognise

_MOST_PROBLEMS = 100  # the rest of what is no hostfile at all would only hide the first ones


def parse_hostfile(text: str, path: str, format: str = AUTO, slots: int | None = None) -> FoundHosts:
    """Parse a list of hosts; hostfiles/README.md has the grammars.

    path: for the messages. format: a name in DIALECTS, or AUTO.
    slots: for hosts whose slots the text does not say, in place of the dialect's own default.
    Raises HostfileError with every problem of the file.
    """
    note = ""
    if format == AUTO:
        dialect, reading, note = recognise(text, slots)
    else:
        dialect = find_dialect(format)
        reading = dialect.parse(text)
    _check(reading, path, f"{dialect.title}'s, which fits most of it" if format == AUTO else "")
    notes = [f"{path}: {each}" for each in (note, *reading.notes) if each]
    return FoundHosts(settle_slots(reading.hosts, slots or dialect.unsaid), f"{path} ({dialect.title})", tuple(notes))


def find_hostfile(path: str, format: str = AUTO, slots: int | None = None) -> FoundHosts:
    """Read and parse a list of hosts in a file; see `parse_hostfile`."""
    return parse_hostfile(read_text(path), path, format, slots)


def read_hostfile(path: str, format: str = AUTO) -> tuple[Host, ...]:
    """Read and parse a list of hosts in a file, for who has no use for what else there is to say about it.

    Raises HostfileError for one that cannot be read or used.
    """
    return find_hostfile(path, format).hosts


def read_text(path: str) -> str:
    """Read a file of text. Raises HostfileError for one that is none, or cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HostfileError(path, [f" is not a text file ({error.reason} at byte {error.start})"]) from None
    except ValueError as error:
        raise HostfileError(path, [f" cannot be read: {error}"]) from None
    except OSError as error:
        raise HostfileError(path, [f" cannot be read: {error.strerror}. Check the path"]) from None


def _check(reading: Reading, path: str, guessed: str) -> None:
    problems = [f"{line}: {why}" for line, why in reading.problems[:_MOST_PROBLEMS]]
    if len(reading.problems) > len(problems):
        problems.append(f" has {len(reading.problems) - len(problems)} more like these. Is it a list of hosts?")
    if problems and guessed:
        problems.append(f" was read as {guessed}. For another dialect say --hostfile-format")
    if not problems and not reading.hosts:
        problems.append(" names no host. Write one host a line, like: node1 slots=4")
    if problems:
        raise HostfileError(path, problems)
