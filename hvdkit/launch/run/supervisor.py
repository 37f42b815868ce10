"""Run an elastic job, and restart it after a loss without the lost hosts, or when better hosts are found."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.elastic.host_pool import HostPool, Hosts, count_slots, wait_for_slots
from hvdkit.launch.elastic.restart_policy import (
    Attempt,
    RestartPolicy,
    attempts_without_progress,
    choose_ranks,
    find_lost_hosts,
    give_up_reason,
)
from hvdkit.launch.hostfiles import format_hosts
from hvdkit.launch.plan.job import name_host
from hvdkit.launch.run.output import Interruption, Output
from hvdkit.launch.run.runner import Runner
from hvdkit.launch.state.outcome import Outcome
from hvdkit.launch.state.ranks import count_ranks

_CHECK_S = 1.0
#: So many checks in a row must agree: a script may fail once, and an elastic job first replaces lost ranks itself.
_CHECKS, _CHECKS_SURVIVING = 1, 20
_PAUSE_S = 1.0

Allocation = tuple[Hosts, int]  # hosts, and the number of ranks on them


@dataclass
class JobSupervisor:
    """The attempts of one job."""

    make_runner: Callable[[Hosts, int], Runner]  # makes the runner of a number of ranks on these hosts
    hosts: Hosts  # of the first attempt
    ranks: int  # of the first attempt
    policy: RestartPolicy
    pool: HostPool  # for later attempts
    output: Output
    interruption: Interruption  # of the runners too
    _attempts: list[Attempt] = field(default_factory=list)
    _asked_to_save: bool = False

    async def run(self) -> int:
        """Run the job, and restart it as the policy allows; returns the exit code."""
        with self.interruption.handled():
            return await self._run_attempts()

    async def _run_attempts(self) -> int:
        allocation: Allocation | None = (self.hosts, self.ranks)
        while allocation is not None:
            runner = self.make_runner(*allocation)
            attempt = await self._run_once(runner, allocation)
            self._attempts.append(attempt)
            reason = "" if self.interruption.number else give_up_reason(self._attempts, self.policy)
            if reason is not None:
                if reason:
                    self.output.say(reason)
                return attempt.result.code
            if not attempt.checkpointed:
                await asyncio.sleep(_PAUSE_S)
            allocation = await self._allocate(self._exclude_lost(runner, attempt.result.outcome, allocation))
            if allocation is not None:
                self._announce_start(allocation)
        return self._end_without_slots()

    async def _run_once(self, runner: Runner, allocation: Allocation) -> Attempt:
        self._asked_to_save = False
        watching = asyncio.create_task(self._watch_hosts(runner, allocation))
        try:
            result = await runner.run_once()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        if self.interruption.number or not (self._asked_to_save and result.outcome is Outcome.SAVED):
            runner.report(result)
        return Attempt(result, runner.ranks.all_joined, runner.ranks.checkpointed, self._asked_to_save)

    def _exclude_lost(self, runner: Runner, outcome: Outcome, allocation: Allocation) -> set[str]:
        """Exclude hosts that were lost; returns the hosts of the allocation that need not be probed."""
        lost = find_lost_hosts(runner.ranks, outcome, runner.job.planned)
        self.pool.exclude(lost)
        if outcome is Outcome.MISSING_RANKS:
            self.pool.probe_again()
            return set()
        return {host.name for host in allocation[0]} - lost

    async def _watch_hosts(self, runner: Runner, allocation: Allocation) -> None:
        """Make the job save and end, for a restart, when better hosts are found."""
        before, checks = None, 0
        needed = _CHECKS_SURVIVING if self.policy.ranks_survive else _CHECKS
        while self.pool.may_change:
            await asyncio.sleep(_CHECK_S)
            hosts = await self.pool.find(self._used_hosts(runner) or {host.name for host in allocation[0]})
            now = hosts, self._choose_ranks(hosts)
            checks = checks + 1 if now == before and self._is_better(runner, *now) else 0
            if checks >= needed:
                self._save_and_restart(runner, *now)
            before = now

    def _save_and_restart(self, runner: Runner, hosts: Hosts, ranks: int) -> None:
        """Make ranks save and end, once; ranks that have saved a checkpoint before can do so."""
        if self._asked_to_save or not (runner.ranks.checkpointed and runner.ranks.all_joined):
            return
        self._asked_to_save = True
        where = f" on {format_hosts(hosts)}" if hosts else ""
        self.output.say(
            f"the hosts have slots for {count_ranks(ranks)}{where}: the job saves, and is started again there."
        )
        runner.save_and_end()

    def _is_better(self, runner: Runner, hosts: Hosts, ranks: int) -> bool:
        """Would the job have more ranks on these hosts, or does it run on a host that is not among them?"""
        removed = self._used_hosts(runner) - {host.name for host in hosts} if runner.job.planned else set()
        return bool(ranks) and (ranks > len(runner.ranks.expected) or bool(removed))

    @staticmethod
    def _used_hosts(runner: Runner) -> set[str]:
        hosts = runner.ranks.hosts
        return {name_host(rank, hosts, runner.job.planned) for rank in hosts}

    def _choose_ranks(self, hosts: Hosts) -> int:
        """Choose the number of ranks for these hosts; 0 if they are too few. Without hosts, any number fits here."""
        return choose_ranks(count_slots(hosts) if self.hosts else None, self.policy)

    async def _allocate(self, trusted: set[str]) -> Allocation | None:
        """Find hosts and ranks for the next attempt; None if none are found in time. trusted: see HostPool.find()."""
        allocation = await wait_for_slots(
            lambda: self.pool.find(trusted),
            self._choose_ranks,
            min_ranks=self.policy.min_ranks,
            wait_s=self.policy.wait_s,
            say=self.output.say,
            may_grow=lambda: not self.interruption.number and self.pool.may_change,
        )
        return None if self.interruption.number else allocation

    def _announce_start(self, allocation: Allocation) -> None:
        hosts, ranks = allocation
        where = f" on {format_hosts(hosts)}" if hosts else ""
        what = "from the last checkpoint" if self._has_checkpoint else "from the beginning: nothing has been saved"
        number = f"start {len(self._attempts) + 1}"
        if in_vain := attempts_without_progress(self._attempts):
            number += f", {in_vain} in a row ended before a checkpoint was saved"
        self.output.say(f"starting again with {count_ranks(ranks)}{where}, {what} ({number}).")

    def _end_without_slots(self) -> int:
        interrupted = self.interruption.number
        if interrupted:
            self.output.say(f"{signal.Signals(interrupted).name}: not started again.")
            return 128 + interrupted
        what = f"there are fewer slots than the {self.policy.min_ranks} that are needed (--min-np)"
        if self._has_checkpoint:
            self.output.say(f"{what}: ended with exit code {TRY_AGAIN}. Run the same command again to continue.")
            return TRY_AGAIN
        self.output.say(f"{what}, and nothing has been saved: not started again.")
        return 1

    @property
    def _has_checkpoint(self) -> bool:
        return any(attempt.checkpointed for attempt in self._attempts) or bool(
            self.policy.checkpoints and CheckpointDirectory(self.policy.checkpoints).numbers()
        )
