"""The file of tuned settings for later runs: JSON, with the plan and the machine on which they were measured."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdkit import __version__
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.errors import ConfigError


@dataclass(frozen=True)
class Key:
    """The plan and the machine on which settings were measured.

    plan: hash of the tensors, in their order, and of the options of their reduction.
    hosts: number of ranks of each host, in the order of the hosts' first ranks.
    transport: name of the transport.
    cores: number of cores of a rank.
    version: of hvdkit.
    """

    plan: str
    hosts: tuple[int, ...]
    transport: str
    cores: float
    version: str = __version__

    def differences(self, other: Key) -> list[str]:
        """Describe the differences of `other`, a key of the same plan, from this key."""
        differences = []
        if self.hosts != other.hosts:
            differences.append(f"{_place(other.hosts)} then, {_place(self.hosts)} now")
        if self.transport != other.transport:
            differences.append(f"transport {other.transport} then, {self.transport} now")
        if self.cores != other.cores:
            differences.append(f"{other.cores:g} core{'s' * (other.cores != 1)} per rank then, {self.cores:g} now")
        if self.version != other.version:
            differences.append(f"hvdkit {other.version} then, {self.version} now")
        return differences


@dataclass(frozen=True)
class Entry:
    """Tuned settings.

    key: plan and machine.
    settings: the tuned settings.
    default_s: median seconds of a step with the first settings.
    tuned_s: median seconds of a step with the tuned settings.
    """

    key: Key
    settings: PlanSettings
    default_s: float
    tuned_s: float


def _place(hosts: Sequence[int]) -> str:
    return f"{sum(hosts)} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}"


def read_entries(path: str) -> list[Entry]:
    """Read all entries of a file. Raises ConfigError if it cannot be read, or is not a file of tuned settings."""
    try:
        return [_parse(item) for item in json.loads(Path(path).read_text(encoding="utf-8"))["plans"]]
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, KeyError, TypeError):
        why = "it was not written by --autotune-save"
    raise ConfigError(
        f"The tuned settings in {path} cannot be read: {why}. Create the file with hvdrun --autotune-save {path} ..."
    )


def _parse(item: dict[str, Any]) -> Entry:
    key = Key(**{**item["key"], "hosts": tuple(map(int, item["key"]["hosts"]))})
    return Entry(key, PlanSettings(**item["settings"]), float(item["default_s"]), float(item["tuned_s"]))


def find_entry(entries: Sequence[Entry], wanted: Key) -> tuple[Entry | None, str]:
    """Return the entry for this key, or None and the reason, as the end of a sentence."""
    same = [entry for entry in entries if entry.key.plan == wanted.plan]
    for entry in same:
        if entry.key == wanted:
            return entry, ""
    if same:
        differences = "; ".join(wanted.differences(same[0].key))
        return None, f"they were measured for this model under other conditions: {differences}"
    return None, "it has none for gradients with these names, sizes and options"


def save_entry(path: str, entry: Entry) -> None:
    """Write an entry to the file, replacing an entry with the same key.

    Raises OSError if the file cannot be written, ConfigError as read_entries() does.
    """
    entries = read_entries(path) if os.path.exists(path) else []
    entries = [each for each in entries if each.key != entry.key] + [entry]
    text = json.dumps({"plans": [asdict(each) for each in entries]}, indent=1)
    part = Path(f"{path}.{os.getpid()}")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)
