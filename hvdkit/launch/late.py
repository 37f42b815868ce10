"""Ranks that do not come to hvd.init() while others wait there: told by hvdrun, with what they are doing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from hvdkit.launch.coming import Wait
from hvdkit.launch.doing import Doing, format_report, name_ranks, read_processes
from hvdkit.launch.ranks import Ranks, explain_exit
from hvdkit.launcher_channel import START_MPI


class LateRanks:
    """Looks after ranks that wait in init(), in the settings of the first that came there.

    ask: tells what the processes of each rank do, see Inquiries.gather(). say: shows a line. changed: is called when
    `given_up` has been set. job: its name.
    given_up: what there is to say of a wait that has been too long; () if none has.
    """

    def __init__(
        self,
        ranks: Ranks,
        ask: Callable[[], Awaitable[Mapping[int, Any]]],
        say: Callable[[str], None],
        changed: Callable[[], None],
        job: str,
    ) -> None:
        self._ranks, self._ask, self._say, self._changed, self._job = ranks, ask, say, changed, job
        self._telling: asyncio.Task[None] | None = None
        self.given_up: tuple[str, ...] = ()

    def left_s(self) -> float | None:
        """Seconds until look() has something to do; None if that takes news first."""
        if self._telling is not None and not self._telling.done():
            return None
        return self._ranks.coming.left_s(self._ranks.members)

    def look(self) -> None:
        """Begin to tell of what has waited too long; returns at once."""
        if self._telling is None or self._telling.done():
            wait = self._ranks.coming.take_due(self._ranks.members)
            if wait is not None:
                self._telling = asyncio.create_task(self._tell(wait))

    async def _tell(self, wait: Wait) -> None:
        lines = (*tell_of_wait(wait, self._ranks, await self._ask()), self._how_to_ask())
        if not wait.over:
            for line in lines:
                self._say(line)
        elif self._ranks.coming.waits:  # they may have come meanwhile
            self.given_up = (*lines, f"It was given up after {wait.seconds:.0f} s, see stall_shutdown_s.")
        self._changed()

    def _how_to_ask(self) -> str:
        return f"What all ranks are doing now is told by `hvdkit stacks {self._job}`, typed on {socket.gethostname()}."


def tell_of_wait(wait: Wait, ranks: Ranks, doing: Mapping[int, Any]) -> list[str]:
    """Say who waits, who is missing, and what those are doing. doing: by rank, see read_processes."""
    missing = wait.missing
    head = f"hvd.init() has been waiting for {wait.seconds:.0f} s: it was called by {_name(wait.present, ranks)}, and "
    if not missing:
        why = f"the ranks do not reach each other{f'; {START_MPI}' if wait.part else ''}. What they are doing:"
        return [f"{head}{why}", *_show(wait.present, ranks, doing)]
    those = "All of them, which are its comm," if wait.part else "All ranks"
    what = f"not by {_name(missing, ranks)}. {those} must call it. What those are doing:"
    return [head + what, *_show(missing, ranks, doing)]


def _show(shown: Iterable[int], ranks: Ranks, doing: Mapping[int, Any]) -> list[str]:
    found = []
    for rank in shown:
        end, host = ranks.ended.get(rank), ranks.hosts.get(rank, "?")
        if end is not None:
            how = explain_exit(end.code, end.signal) if end.code else "has ended, with exit code 0"
            found.append(Doing(rank, host, why=how))
        else:
            found += read_processes(rank, host, doing.get(rank))
    return format_report(found).rstrip("\n").split("\n")


def _name(shown: Iterable[int], ranks: Ranks) -> str:
    return name_ranks([Doing(rank, ranks.hosts.get(rank, "?")) for rank in shown])
