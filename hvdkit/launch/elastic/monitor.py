"""Supervise an elastic job whose ranks continue when others die: start replacements and kill hanging ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from hvdkit.launch.agent import wire
from hvdkit.launch.agent.partition_tolerance import disable_session_timeouts
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.registration import StartOrders
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.ranks import Phase, Ranks, count_ranks, describe_loss, name_rank
from hvdkit.launcher_channel import FAILED, LOST


class ElasticMonitor:
    """Supervises the surviving ranks of an elastic job, for the runner.

    plan: plans the start orders of ranks, see plan_start_orders. say: prints a line.
    too_few: fewer ranks than --min-np are left. partitioned: ranks were lost without mpirun noticing.
    hang_timeout_s: see find_hanging.
    """

    def __init__(
        self,
        ranks: Ranks,
        control: ControlServer,
        job: Job,
        plan: Callable[[Iterable[int]], StartOrders],
        say: Callable[[str], None],
    ) -> None:
        self._ranks, self._control, self._plan, self._say = ranks, control, plan, say
        self._min_ranks = max(1, job.config.min_np) if job.survives else 0  # 0: the loss of any rank ends the job
        self.hang_timeout_s = job.config.elastic_hang_timeout_s if job.elasticity is not Elasticity.OFF else 0.0
        self.too_few = self.partitioned = False
        self._timeouts_problem = ""

    def begin(self, session: int) -> None:
        """Keep the launcher running when a host is cut off. session: of mpirun and the processes that it started."""
        if self._min_ranks:
            self._timeouts_problem = disable_session_timeouts(session)

    def continue_without_failed(self) -> bool:
        """Let the other ranks continue without the failed ranks; returns whether they can."""
        failed = self._ranks.failures
        left = len(self._ranks.joined - set(failed))
        if not self._min_ranks or not left or self.too_few or not self._ranks.all_joined:
            return False
        self.too_few = left < self._min_ranks
        then = (
            f"{count_ranks(left)} left, and --min-np is {self._min_ranks}: ending the job"
            if self.too_few
            else f"continuing with {count_ranks(left)}"
        )
        if self._timeouts_problem and not self.too_few and any(self._ranks.states[rank].silent for rank in failed):
            then += (
                "; mpirun will notice within minutes, and end the job: the timeouts of its connections cannot be "
                f"changed on this system ({self._timeouts_problem})"
            )
        for rank in failed:
            state = self._ranks.states[rank]
            self.partitioned = self.partitioned or state.end is None
            self._say(f"{describe_loss(self._ranks, rank)}{'' if state.joined else ', before it joined'}; {then}.")
            self._ranks.continue_without(rank)
            if not state.joined:
                self._control.send_all(wire.EVENT, f"{FAILED}{rank}\n".encode())
            # If a host does not answer, MPI gets no other report that its ranks are lost.
            self._control.send_all(wire.EVENT, f"{LOST}{self._control.arrivals[rank].process}\n".encode())
        return True

    def check(self) -> None:
        """Start replacements, end those that register too late, and kill ranks that hang."""
        for rank in sorted(self._ranks.in_phase(Phase.REPLACEMENT)):
            if rank not in self._control.connected:
                self._say(f"{name_rank(self._ranks, rank)} was lost before it was started.")
                self._ranks.continue_without(rank)
                self._control.send_all(wire.EVENT, f"{FAILED}{rank}\n".encode())
            elif not self._comes_late(rank):
                self._ranks.admit(rank)
                self._control.release({rank: self._plan(sorted(self._ranks.expected)).by_rank[rank]})
                host = self._ranks.states[rank].host
                self._say(f"rank {rank} starts on {host}, in place of a lost rank.")
        for rank, arrival in self._control.arrivals.items():
            state = self._ranks.states[rank]
            if arrival.joins and not state.joined and state.phase is not Phase.LEFT_BEHIND and self._comes_late(rank):
                self._control.send(rank, wire.STOP)
                self._ranks.continue_without(rank)
        hanging = find_hanging(self._ranks, self.hang_timeout_s)
        for rank in sorted(hanging):
            state = self._ranks.states[rank]
            if state.killed_by_hvdrun:
                continue
            state.killed_by_hvdrun = True
            self._say(f"{name_rank(self._ranks, rank)} is killed: {hanging[rank]} (--elastic-hang-timeout-s).")
            self._control.send(rank, wire.SIGNAL, str(int(signal.SIGKILL)).encode())

    def _comes_late(self, rank: int) -> bool:
        return self._ranks.training_ended or self._ranks.saved or rank < self._ranks.first_awaited


def find_hanging(ranks: Ranks, timeout_s: float) -> dict[int, str]:
    """Find the ranks to kill so that the others can continue, each with the reason.

    timeout_s: how long a rank may be stopped by a signal, and how long ranks may wait for others to form a new world;
    0 for no limit.
    """
    if timeout_s <= 0:
        return {}
    now = ranks.clock()
    hanging = {}
    changing_s = [ranks.states[rank].changing_s for rank in ranks.in_phase(Phase.CHANGING)]
    absent = ranks.in_phase(Phase.READY)
    if changing_s and now - min(changing_s) > timeout_s:
        for rank in absent:
            hanging[rank] = f"the other ranks have waited {timeout_s:g} s for it to form a new world with them"
    if changing_s and now - max(changing_s) > timeout_s and not absent and not ranks.failures:
        for rank in ranks.in_phase(Phase.CHANGING):  # MPI has not reported the end of a rank to one of these
            hanging[rank] = f"the remaining ranks have not formed a new world within {timeout_s:g} s"
    for rank in ranks.paused:
        state = ranks.states[rank]
        if now - state.paused_s > timeout_s:
            hanging[rank] = f"it has been stopped by {signal.Signals(state.paused_by).name} for {timeout_s:g} s"
    return hanging
