"""What is to be run, as far as somebody said so."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.tools.doctor.script import Script


@dataclass(frozen=True)
class Job:
    """hosts: how many. ranks: of all hosts, as asked for; 0 if nobody said. slots: that the hosts have; 0 if unknown.

    ranks_here: that this host would get; 0 if unknown.
    """

    hosts: int = 1
    ranks: int = 0
    slots: int = 0
    ranks_here: int = 0
    script: Script | None = None
