"""Report agents and launchers that a signal has stopped (SIGSTOP), which keep the job from ending."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from hvdkit.launch.agent.session_reaper import read_process
from hvdkit.launch.state.ranks import Ranks, name_rank

LOOK_S = 2.0
KILL_S = 30.0  # at the end of a job


class StoppedProcesses:
    """Reports stopped processes of this host, and kills those that keep a job from ending.

    An agent reports its rank if that is stopped.

    ranks: of the job.
    say: prints a line.
    local: all agents are on this host.
    agents_may_stop_s: how long an agent may be stopped, in seconds, before the end of the job too, because the other
    ranks continue without its rank; 0 for no limit.
    """

    def __init__(self, ranks: Ranks, say: Callable[[str], None], *, local: bool, agents_may_stop_s: float) -> None:
        self._ranks, self._say, self._local, self._agents_may_stop_s = ranks, say, local, agents_may_stop_s
        self._since_s: dict[int, float] = {}  # time of the first check that found it stopped, by process
        self._reported: set[int] = set()
        self._next_look_s = 0.0

    def check(self, launcher: str, process: int) -> None:
        """Check the processes, if a check is due. process: number of the launcher's process."""
        now = self._ranks.clock()
        if now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_S
        watched = {process: launcher, **(self._find_agents() if self._local else {})}
        stopped = {pid: name for pid, name in watched.items() if _read_stat(pid)[:1] == ["T"]}
        self._since_s = {pid: self._since_s.get(pid, now) for pid in stopped}
        self._reported &= stopped.keys()
        for pid, name in stopped.items():
            stopped_s = now - self._since_s[pid]
            # Not at once: a scheduler that continues a suspended job continues hvdrun first.
            if stopped_s and pid not in self._reported:
                self._say(f"{name} was stopped by a signal, and the job cannot end; to continue it: kill -CONT {pid}")
                self._reported.add(pid)
            limit_s = find_limit_s(self._ranks, 0.0 if pid == process else self._agents_may_stop_s)
            if 0 < limit_s < stopped_s:
                self._say(f"{name} is killed: it has been stopped for {stopped_s:.0f} s.")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _find_agents(self) -> dict[int, str]:
        """Find the agents whose ranks have not reported an end, as parents of the ranks' commands."""
        found = {}
        for rank, state in self._ranks.states.items():
            stat = _read_stat(state.start.pid) if state.start is not None and state.end is None else []
            if len(stat) > 1:
                found[int(stat[1])] = f"the agent of {name_rank(self._ranks, rank)}"
        return found


def find_limit_s(ranks: Ranks, may_stop_s: float) -> float:
    """Find how long a process of hvdkit's may be stopped, in seconds; 0 for no limit.

    may_stop_s: the limit if the job has one for such processes; else they have one at the end of the job only.
    """
    return may_stop_s or (KILL_S if ranks.ended or ranks.training_ended else 0.0)


def _read_stat(pid: int) -> list[str]:
    """Read the state of a process, its parent, and so on; [] after its end."""
    return read_process(pid, "stat").rpartition(")")[2].split()
