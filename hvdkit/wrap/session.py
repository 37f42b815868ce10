"""One wrapped process: what was asked for, who it is, and what it has to tell."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hvdkit.config import Config
from hvdkit.wrap.report import Report


@dataclass
class Session:
    """What all parts of the wrapping know.

    rank, size: as the launcher told; size is 0 where it did not, until init(). factor: how many of the script's batches
    make one step.
    """

    config: Config
    rank: int
    size: int
    active: bool = True
    report: Report = field(default_factory=Report)

    @property
    def first(self) -> bool:
        """Is this the rank that prints and writes?"""
        return self.rank == 0

    @property
    def shows_table(self) -> bool:
        """Does this rank print the table of what was changed?"""
        return self.first and self.config.wrap_table

    @property
    def multiplies(self) -> bool:
        """Has each rank a whole batch of the script's?"""
        return self.config.wrap_batch == "multiply"

    @property
    def rate_factor(self) -> float:
        """What the learning rate is multiplied with."""
        if not self.multiplies or self.config.wrap_rate == "keep":
            return 1.0
        return float(self.size) if self.config.wrap_rate == "linear" else float(self.size) ** 0.5


_session: Session | None = None


def open_session(config: Config, *, rank: int, size: int) -> Session:
    """Begin; a process that is forked from this one (a DataLoader's worker, say) is no rank."""
    global _session
    _session = made = Session(config, rank, size)

    def leave() -> None:
        made.active = False

    os.register_at_fork(after_in_child=leave)
    return made


def current() -> Session:
    """The session of this process; there is one wherever something is wrapped."""
    assert _session is not None
    return _session


def active() -> bool:
    """Is this a wrapped rank, and no child of one?"""
    return _session is not None and _session.active
