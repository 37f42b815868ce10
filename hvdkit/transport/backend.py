"""The interface of a backend, beside moving bytes. A backend, MPI or Gloo, connects processes that share no memory.

Each is a module that has the functions of Backend; transport/select.py finds it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.part import Part
from hvdkit.world import World

#: Ends all ranks of the job with this exit status.
Abort = Callable[[int], None]


class Newcomers(Protocol):
    """Ranks that are being started in the place of lost ones; all ranks of the world hold one of these."""

    @property
    def starters(self) -> list[int]:
        """On rank 0: the ranks that have started those that are ready, one a host."""

    def take_in(self, starters: Sequence[int]) -> None:
        """Take the ready ones into the world, behind its ranks; collective. starters: rank 0's, on all ranks.

        Raises RankLostError, on all ranks, if one of them or of the world's has died; nobody is taken in then.
        """

    def forget(self) -> None:
        """Training is over: stop to wait for them. Not collective."""

    def give_up(self) -> None:
        """Stop to wait for those that are not ready; if they come later they end. Not collective."""


class Membership(Protocol):
    """The ranks of a world that goes on without those that died, and takes in new ones."""

    def changed(self) -> bool:
        """Are the ranks others than the launcher started?"""

    def rank(self) -> int:
        """This process's number among the ranks that there are now."""

    def size(self) -> int:
        """How many ranks there are now."""

    def interrupt(self) -> None:
        """Make every call of any rank on hvdkit's connections fail, now and later; not collective."""

    def shrink(self) -> int:
        """Go on with the ranks that are left, in their order; collective among them. Returns how many have gone."""

    def is_so_on_all(self, true: bool) -> bool:
        """Is it true on every rank? The same answer on all; collective. Raises RankLostError if one has died."""

    def changing(self) -> AbstractContextManager[None]:
        """Within, the world's connections are made anew while a thread may still be starting ranks."""

    def start_ranks(
        self,
        command: Sequence[str],
        counts: Sequence[int],
        *,
        first: int,
        host: str,
        ready: Callable[[float], None],
        died: Callable[[], bool],
    ) -> Newcomers:
        """Start ranks in threads, on the hosts of those that are left; collective. Returns at once.

        command: that starts those of this host. counts: how many each rank starts; the first rank of a host counts.
        first: the first rank of this host. host: as the launcher calls this host; "" if there is no other one. ready:
        called on rank 0, in another thread, with the time when all of them are ready to be taken in, or when it is
        plain that some never will be. died: has one of them?
        """


class Backend(Protocol):
    """A module of these functions."""

    def can_load(self) -> bool:
        """Is the library here? Loads it, and starts nothing."""

    def connect(self, world: World, part: Part | None) -> tuple[BaseTransport, Abort | None]:
        """Connect the ranks; collective.

        world: as the launcher told it. part: the processes that make the world; None for all of the job. Returns also
        what ends all ranks of the job; None where ending this process is enough.
        Raises MissingDependencyError without the library, WorldError if it and the launcher disagree, ConfigError for a
        part that there is not, TransportError if the ranks do not reach each other.
        """

    def takes_calls_from_threads(self) -> bool:
        """May the script call the library too while hvdkit works?"""

    def open_membership(self) -> Membership | None:
        """For a world whose ranks change; None if this backend's stay. Raises TransportError if the library cannot."""
