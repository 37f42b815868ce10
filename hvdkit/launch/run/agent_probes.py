"""Report agents on other hosts that do not answer, and give up those that keep the job from ending.

If a process is stopped (SIGSTOP), or hangs, the kernel of its host keeps its connections open, so TCP keepalive finds
only hosts that do not answer. An agent answers a probe whatever its rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdkit.launch.agent import wire
from hvdkit.launch.run.stopped import KILL_S
from hvdkit.launch.state.authenticated_server import Channel
from hvdkit.launch.state.ranks import Phase, Ranks, name_rank

PROBE_S = 5.0
_REPORT_S = 10.0  # more than the 8 s after which keepalive closes the connection of a host that does not answer
_ANSWERING = (Phase.REGISTERED, Phase.RUNNING, Phase.READY, Phase.CHANGING)


class AgentProbes:
    """Sends a probe to each agent from which nothing has come since the last check.

    Times are counted in checks, of which hvdrun does none while it is stopped itself, or waits for the reader of its
    output. A closed connection is the loss of its rank.

    ranks: of the job.
    connected: the connections to the agents, by rank.
    say: prints a line.
    agents_may_stop_s: see StoppedProcesses.
    """

    def __init__(
        self, ranks: Ranks, connected: Mapping[int, Channel], say: Callable[[str], None], *, agents_may_stop_s: float
    ) -> None:
        self._ranks, self._connected, self._say, self._agents_may_stop_s = ranks, connected, say, agents_may_stop_s
        self._received: dict[int, int] = {}  # bytes received at the last check that found more, by rank
        self._checks: dict[int, int] = {}  # checks since then, by rank; the first sent the probe
        self._reported: set[int] = set()
        self._next_check_s = 0.0

    def check(self) -> None:
        """Probe the agents, if a check is due."""
        now = self._ranks.clock()
        if now < self._next_check_s:
            return
        self._next_check_s = now + PROBE_S
        probed = self._ranks.in_phase(*_ANSWERING) & self._connected.keys()
        self._reported &= probed
        self._checks = {rank: self._checks.get(rank, 0) for rank in probed}
        for rank in sorted(probed):
            self._check_one(rank, self._connected[rank])

    def _check_one(self, rank: int, channel: Channel) -> None:
        if channel.received != self._received.get(rank):
            self._received[rank], self._checks[rank] = channel.received, 0
            if rank in self._reported:
                self._reported.discard(rank)
                self._say(f"the agent of {name_rank(self._ranks, rank)} answers again.")
            return
        unanswered_s = self._checks[rank] * PROBE_S
        if not unanswered_s:
            channel.send(wire.PROBE)
        self._checks[rank] += 1
        limit_s = self._find_limit_s()
        if 0 < limit_s < unanswered_s:
            self._ranks.give_up(rank, unanswered_s)
            channel.abort()
        elif unanswered_s >= _REPORT_S and rank not in self._reported:
            self._reported.add(rank)
            self._say(self._describe(rank, unanswered_s))

    def _find_limit_s(self) -> float:
        """Find how long an agent may leave a probe unanswered, in seconds; 0 for no limit.

        An agent that waits for a file system does not answer either, so a job whose ranks run on is not ended for it.
        """
        if self._agents_may_stop_s:
            return max(self._agents_may_stop_s, _REPORT_S)  # the report, with the cure, comes first
        silent = all(checks * PROBE_S >= _REPORT_S for checks in self._checks.values())
        return KILL_S if self._ranks.training_ended or (self._ranks.ended and silent) else 0.0

    def _describe(self, rank: int, unanswered_s: float) -> str:
        who, state = name_rank(self._ranks, rank), self._ranks.states[rank]
        agent = f"$(ps -o ppid= -p {state.start.pid})" if state.start is not None else "PID"
        return (
            f"the agent of {who} has not answered for {unanswered_s:.0f} s, and the job cannot end without it; if a "
            f"signal has stopped it, this continues it on {state.host}: kill -CONT {agent}"
        )
