"""The state of a wrapped process: settings, rank and report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hvdkit_wrap.report import Report
from hvdkit_wrap.settings import WrapSettings


@dataclass
class Session:
    """The settings, the rank and the report of this process, for all modules of hvdkit_wrap.

    rank, size: from the launcher's variables; size is 0 until init() if the launcher does not set it.
    active: False in a forked child.
    """

    settings: WrapSettings
    rank: int
    size: int
    active: bool = True
    report: Report = field(default_factory=Report)

    @property
    def first(self) -> bool:
        """Is this rank 0, which prints and writes files?"""
        return self.rank == 0

    @property
    def shows_table(self) -> bool:
        """Does this rank print the table of changes?"""
        return self.first and self.settings.table

    @property
    def multiplies(self) -> bool:
        """Does each rank take a whole batch of the script?"""
        return self.settings.batch == "multiply"

    @property
    def rate_factor(self) -> float:
        """Return the factor of the learning rate."""
        if not self.multiplies or self.settings.rate == "keep":
            return 1.0
        return float(self.size) if self.settings.rate == "linear" else float(self.size) ** 0.5


_session: Session | None = None


def open_session(settings: WrapSettings, *, rank: int, size: int) -> Session:
    """Open the session; a process that is forked from this one, such as a DataLoader's worker, is not a rank."""
    global _session
    _session = made = Session(settings, rank, size)

    def leave() -> None:
        made.active = False

    os.register_at_fork(after_in_child=leave)
    return made


def current() -> Session:
    """Return the session of this process, which exists wherever something is wrapped."""
    assert _session is not None
    return _session


def active() -> bool:
    """Is this process a wrapped rank, and not its child?"""
    return _session is not None and _session.active
