"""The interface of a backend, MPI or Gloo, which connects processes that share no memory.

Each backend is a module with the functions of Backend; transport/select.py finds it by name. Transport moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.rank_subset import RankSubset
from hvdkit.world import World

#: Ends all ranks of the job with this exit status.
Abort = Callable[[int], None]


class PendingRanks(Protocol):
    """Replacement ranks that are being started; every rank of the world has such an object."""

    @property
    def starters(self) -> list[int]:
        """Return, on rank 0, the ranks that have started the ready replacements, one for each host."""

    def take_in(self, starters: Sequence[int]) -> None:
        """Add the ready replacements to the world, after its ranks; collective. starters: rank 0's, on all ranks.

        Raises RankLostError on all ranks, and adds no rank, if a replacement or a rank of the world has died.
        """

    def forget(self) -> None:
        """Stop waiting for the replacements, because training has ended. Not collective."""

    def give_up(self) -> None:
        """Stop waiting for replacements that are not ready; if they come later, they end. Not collective."""


class Membership(Protocol):
    """Changes the ranks of a world: it continues without dead ranks, and adds new ranks."""

    def changed(self) -> bool:
        """Return whether the ranks differ from those that the launcher started."""

    def rank(self) -> int:
        """Return this process's number in the present world."""

    def size(self) -> int:
        """Return the number of ranks in the present world."""

    def interrupt(self) -> None:
        """Make every call of any rank on hvdkit's connections fail, now and later; not collective."""

    def shrink(self) -> int:
        """Continue with the surviving ranks, in their order; collective among them. Returns how many have died."""

    def is_so_on_all(self, true: bool) -> bool:
        """Return on every rank whether `true` is True on all; collective. Raises RankLostError if a rank has died."""

    def changing(self) -> AbstractContextManager[None]:
        """Return a context in which the world is reconnected while a thread may still be starting ranks."""

    def start_ranks(
        self,
        command: Sequence[str],
        counts: Sequence[int],
        *,
        first: int,
        host: str,
        ready: Callable[[float], None],
        died: Callable[[], bool],
    ) -> PendingRanks:
        """Start ranks in threads, on the hosts of the surviving ranks; collective. Returns at once.

        command: command line that starts the ranks of this host.
        counts: how many ranks each rank starts; only the first rank of a host starts any.
        first: the first rank of this host.
        host: this host's name for the launcher; "" if the world has only this host.
        ready: called on rank 0, in another thread, with the time, when all new ranks are ready, or when it is certain
        that some will never be.
        died: returns whether one of the new ranks has died.
        """


class Backend(Protocol):
    """The functions of a backend's module."""

    def can_load(self) -> bool:
        """Return whether the library is installed; loads it without starting it."""

    def connect(self, world: World, subset: RankSubset | None) -> tuple[BaseTransport, Abort | None]:
        """Connect the ranks, and return their transport and an Abort; collective.

        world: as read from the launcher's variables. subset: the processes of the world; None for the whole job.
        The Abort is None if ending this process is enough to end the job.
        Raises MissingDependencyError without the library, WorldError if it and the launcher disagree, ConfigError for a
        subset that does not exist, TransportError if the ranks cannot reach each other.
        """

    def takes_calls_from_threads(self) -> bool:
        """Return whether the script may call the library too while hvdkit uses it in another thread."""

    def open_membership(self) -> Membership | None:
        """Return the Membership of a world whose ranks change; None if the backend has only fixed worlds.

        Raises TransportError if the library does not support it.
        """
