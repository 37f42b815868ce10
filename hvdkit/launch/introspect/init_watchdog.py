"""Report ranks that do not call hvd.init() while others wait there, with their stacks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvdkit.launch.introspect.stack_report import ProcessStack, format_report, name_ranks, read_processes
from hvdkit.launch.state.ranks import Ranks, explain_exit
from hvdkit.launcher_channel import START_MPI

_ENDED_S = 5.0  # of a wait for a rank that has ended, before the job is given up


class InitWait(NamedTuple):
    """A wait in hvd.init() that is due for a report.

    present: the ranks that wait. missing: the ranks that have not called it.
    is_subset: only the ranks in `present` and `missing` have to call it; other ranks of the job need not.
    ended: the missing ranks that have ended, and never call it.
    """

    seconds: float  # since the first of them called it
    present: tuple[int, ...]
    missing: tuple[int, ...]
    over: bool  # the time limit has passed, or a missing rank has ended
    is_subset: bool = False
    ended: tuple[int, ...] = ()


class InitWaits:
    """Finds out when a wait in hvd.init() is due for a report.

    Ranks that form a world from some ranks of the job, see InitCall.ranks, have a wait of their own. Intervals are
    settings of the rank that called init() first.

    fixed: the world cannot do without a rank that has ended, as it can in an elastic job.
    """

    def __init__(self, ranks: Ranks, *, fixed: bool = True) -> None:
        self._ranks, self._fixed = ranks, fixed
        self._reported_s: dict[frozenset[int], float] = {}  # by ranks of the world: time of the last report

    def left_s(self) -> float | None:
        """Return the seconds until a wait is due for a report or for its end; None without such a wait."""
        return min((left_s for left_s, _ in self._waits()), default=None)

    def take_due(self) -> InitWait | None:
        """Return the wait that is due for a report and mark it as reported; None if no wait is due."""
        left_s, present = min(self._waits(), default=(1.0, []))
        if left_s > 0:
            return None
        now = self._ranks.clock()
        first = self._ranks.states[present[0]]
        assert first.init_call is not None
        _, shutdown_s, subset = first.init_call
        self._reported_s[subset] = now
        waited_s = now - first.init_called_s
        missing = sorted((subset or self._ranks.members) - set(present))
        ended = self._find_ended(missing) if waited_s >= _ENDED_S else ()
        over = bool(ended) or 0 < shutdown_s <= waited_s
        return InitWait(waited_s, tuple(sorted(present)), tuple(missing), over, bool(subset), ended)

    def _find_ended(self, missing: Iterable[int]) -> tuple[int, ...]:
        """Return the missing ranks that have ended without a failure, which ends the job anyway, or a world before.

        The wait has no end without them.
        """
        states = self._ranks.states
        known = sorted(rank for rank in missing if self._fixed and rank in states)
        ends = {rank: states[rank].end for rank in known if not states[rank].joined}
        return tuple(rank for rank, end in ends.items() if end is not None and end.code == 0)

    def _waits(self) -> list[tuple[float, list[int]]]:
        """Return the seconds until each wait is due, and its ranks in the order of their calls."""
        waiting: dict[frozenset[int], list[tuple[float, int]]] = {}
        for rank in self._ranks.members:
            state = self._ranks.states[rank]
            if state.init_call is not None:
                waiting.setdefault(state.init_call.ranks, []).append((state.init_called_s, rank))
        found = []
        now = self._ranks.clock()
        for subset, calls in waiting.items():
            since_s, first = min(calls)
            call = self._ranks.states[first].init_call
            assert call is not None
            due = []
            if call.check_s > 0:
                due.append(max(since_s, self._reported_s.get(subset, since_s)) + call.check_s)
            if call.shutdown_s > 0:
                due.append(since_s + call.shutdown_s)
            if self._find_ended((subset or self._ranks.members).difference(rank for _, rank in calls)):
                due.append(since_s + _ENDED_S)
            if due:
                found.append((min(due) - now, [rank for _, rank in sorted(calls)]))
        return found


class InitWatchdog:
    """Reports waits in hvd.init(), and ends the job when a wait exceeds its limit.

    ranks: of the job.
    take_stacks: gets the stacks of each rank's processes, see ControlServer.take_stacks().
    say: prints a line.
    changed: called after each report, when `given_up` may have been set.
    describe: describes the job, with its name.
    fixed: see InitWaits.

    given_up: the report on the wait that exceeded its limit; () without such a wait.
    """

    def __init__(
        self,
        ranks: Ranks,
        take_stacks: Callable[[], Awaitable[Mapping[int, Any]]],
        say: Callable[[str], None],
        changed: Callable[[], None],
        describe: Callable[[], Mapping[str, Any]],
        *,
        fixed: bool = True,
    ) -> None:
        self._ranks, self._take_stacks, self._describe = ranks, take_stacks, describe
        self._say, self._changed = say, changed
        self._waits = InitWaits(ranks, fixed=fixed)
        self._reporting: asyncio.Task[None] | None = None
        self.given_up: tuple[str, ...] = ()

    def left_s(self) -> float | None:
        """Return the seconds until check() must be called again; None if only an event requires that."""
        return None if self._is_reporting() else self._waits.left_s()

    def check(self) -> None:
        """Start to report a wait that is due; returns at once."""
        wait = None if self._is_reporting() else self._waits.take_due()
        if wait is not None:
            self._reporting = asyncio.create_task(self._report(wait))

    def close(self) -> None:
        """Stop reporting: the job has ended."""
        if self._reporting is not None:
            self._reporting.cancel()

    def _is_reporting(self) -> bool:
        return self._reporting is not None and not self._reporting.done()

    async def _report(self, wait: InitWait) -> None:
        job, host = self._describe()["name"], socket.gethostname()
        command = f"For the stacks of all ranks run `hvdkit stacks {job}` on {host}."
        lines = (*describe_wait(wait, self._ranks, await self._take_stacks()), command)
        if not wait.over:
            for line in lines:
                self._say(line)
        elif any(state.init_call is not None for state in self._ranks.states.values()) and not self._ranks.failures:
            # They may have joined since.
            why = f"after {wait.seconds:.0f} s (--stall-shutdown-s)"
            if wait.ended:
                why = f"because {_name(wait.ended, self._ranks)} cannot call it any more"
            self.given_up = (*lines, f"The job was given up {why}.")
        self._changed()


def describe_wait(wait: InitWait, ranks: Ranks, stacks: Mapping[int, Any]) -> list[str]:
    """Describe which ranks wait and which are missing, with stacks. stacks: by rank, see read_processes."""
    missing = wait.missing
    head = f"hvd.init() has been waiting for {wait.seconds:.0f} s: it was called by {_name(wait.present, ranks)}, "
    if not missing:
        why = f"but the ranks cannot reach each other{f'; {START_MPI}' if wait.is_subset else ''}. Their stacks:"
        return [head + why, *_show(wait.present, ranks, stacks)]
    all_ranks = "All ranks of its comm" if wait.is_subset else "All ranks"
    what = f"and not by {_name(missing, ranks)}. {all_ranks} must call it. Stacks of the missing ranks:"
    return [head + what, *_show(missing, ranks, stacks)]


def _show(shown: Iterable[int], ranks: Ranks, stacks: Mapping[int, Any]) -> Sequence[str]:
    found = []
    for rank in shown:
        end, host = ranks.states[rank].end, ranks.states[rank].host or "?"
        if end is not None:
            how = explain_exit(end.code, end.signal) if end.code else "has ended, with exit code 0"
            found.append(ProcessStack(rank, host, why=how))
        else:
            found += read_processes(rank, host, stacks.get(rank))
    return format_report(found).rstrip("\n").split("\n")


def _name(shown: Collection[int], ranks: Ranks) -> str:
    return name_ranks([ProcessStack(rank, ranks.states[rank].host or "?") for rank in shown])
