"""What a dialect of host lists is, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.launch.hosts.host import Host
from hvdkit.launch.hosts.reading import Reading


@dataclass(frozen=True)
class Dialect:
    """One way to write a list of hosts.

    name: for --hostfile-format. title: for sentences.
    parse: text to Reading; never raises.
    write: hosts to text. Hosts have slots unless `unsaid` is None, and nothing that `carries` does not name.
    unsaid: slots of a host that the text gives none; None for as many as it has cores.
    rule: a clause that says so, and what repeated hosts mean.
    carries: which of user, max_slots, ipv6, slots can be written in it.
    could_be: whether a text may be taken for this dialect when nobody has named one.
    """

    name: str
    title: str
    parse: Callable[[str], Reading]
    write: Callable[[Sequence[Host]], str]
    unsaid: int | None
    rule: str
    carries: frozenset[str] = frozenset({"slots"})
    could_be: Callable[[str], bool] = lambda text: True
