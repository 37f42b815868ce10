"""A job whose ranks may be outlived: the others hear of a loss, new ranks are taken in, those that hang are ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.launch.agent import wire
from hvdkit.launch.agent.silence import outlast_silence
from hvdkit.launch.control import Control
from hvdkit.launch.patience import find_hanging
from hvdkit.launch.ranks import Ranks, count_ranks, describe_loss
from hvdkit.launcher_channel import FAILED, LOST

_SOON = "mpirun will notice within minutes, and end the job"


class Outliving:
    """The part of the runner that only elastic jobs have.

    least: ranks with which the job goes on when others die. patience_s: how long it waits for a rank that hangs; 0 for
    ever. plan: the orders for ranks that are to start, see plan_orders. say: tells the user.
    too_few: fewer than `least` are left. cut_off: ranks were lost of which mpirun does not know.
    """

    def __init__(
        self,
        ranks: Ranks,
        control: Control,
        *,
        least: int,
        patience_s: float,
        plan: Callable[[list[int]], Mapping[int, Mapping[str, Any]]],
        say: Callable[[str], None],
    ) -> None:
        self._ranks, self._control, self._least, self._patience_s = ranks, control, least, patience_s
        self._plan, self._say = plan, say
        self.too_few = self.cut_off = False
        self._joined, self._dismissed, self._killed = set[int](), set[int](), set[int]()
        self._impatient = ""

    def begin(self, session: int) -> None:
        """All ranks are there. session: of mpirun and what it has started."""
        self._impatient = outlast_silence(session)

    def goes_on(self) -> bool:
        """Do the others go on without the ranks that have failed?"""
        failed = self._ranks.failures
        left = len(self._ranks.ready - set(failed))
        if not left or self.too_few or not self._ranks.begun:
            return False
        self.too_few = left < self._least
        then = (
            f"{left} of at least {self._least} left: ending" if self.too_few else f"going on with {count_ranks(left)}"
        )
        if self._impatient and not self.too_few and set(failed) & set(self._ranks.silent):
            then += f"; {_SOON}, as its connections cannot be changed here ({self._impatient})"
        for rank in failed:
            taken_in = rank in self._ranks.ready
            self.cut_off = self.cut_off or rank not in self._ranks.ended
            before = "" if taken_in else ", before it was taken in"
            self._say(f"{describe_loss(self._ranks, rank)}{before}; {then}.")
            self._ranks.outlive(rank)
            if not taken_in:
                self._control.send_all(wire.NEWS, f"{FAILED}{rank}\n".encode())
            # Of a host that has fallen silent nobody else tells MPI.
            self._control.send_all(wire.NEWS, f"{LOST}{self._control.arrivals[rank].process}\n".encode())
        return True

    def look(self) -> None:
        """See who has come, who has come too late, and who hangs."""
        self._take_in()
        self._dismiss()
        self._kill_hanging()

    def _take_in(self) -> None:
        """Let ranks start that others have started in place of those that were lost."""
        for rank, arrival in self._control.arrivals.items():
            if arrival.joins and rank not in self._joined and not self._comes_late(rank):
                self._joined.add(rank)
                self._ranks.join(rank)
                self._control.release({rank: self._plan(sorted(self._ranks.expected))[rank]})
                self._say(f"rank {rank} starts on {arrival.host}, in place of one that was lost.")

    def _dismiss(self) -> None:
        """End ranks that have come too late to be taken in."""
        coming = {rank for rank, arrival in self._control.arrivals.items() if arrival.joins} - self._ranks.ready
        for rank in filter(self._comes_late, coming - self._dismissed):
            self._dismissed.add(rank)
            self._control.send(rank, wire.STOP)
            self._ranks.outlive(rank)

    def _kill_hanging(self) -> None:
        """End ranks that keep the others from going on."""
        found = find_hanging(self._ranks, time.monotonic(), self._patience_s)
        for rank in sorted(found.keys() - self._killed):
            self._killed.add(rank)
            place = f"rank {rank} on {self._ranks.hosts[rank]}"
            self._say(f"{place} is killed: {found[rank]} (--elastic-patience-s).")
            self._control.send(rank, wire.SIGNAL, str(int(signal.SIGKILL)).encode())

    def _comes_late(self, rank: int) -> bool:
        return self._ranks.over or self._ranks.saved or rank < self._ranks.past
