"""A job that is started again: when it is lost, without the hosts that are; when there are other hosts, on those."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.available import Available, Hosts
from hvdkit.launch.hosts import format_hosts
from hvdkit.launch.output import Output
from hvdkit.launch.ranks import count_ranks
from hvdkit.launch.restarting import Life, Terms, choose_ranks, count_in_vain, find_lost_hosts, name_host, why_not_again
from hvdkit.launch.room import count_slots, describe_slots, wait_for_room
from hvdkit.launch.runner import Runner
from hvdkit.launch.verdict import How

_LOOK_S = 1.0
#: A script may have a bad moment; and ranks of an elastic job are first given time to replace each other.
_LOOKS, _LOOKS_OUTLIVING = 1, 20
_PAUSE_S = 1.0

Plan = tuple[Hosts, int]


@dataclass
class Lives:
    """The lives of one job.

    make: a runner for so many ranks on these hosts. hosts, ranks: of the first life. available: hosts for the next.
    folder: where ranks keep commits; "" for none.
    """

    make: Callable[[Hosts, int], Runner]
    hosts: Hosts
    ranks: int
    terms: Terms
    available: Available
    folder: str = ""
    output: Output = field(default_factory=Output)
    _lives: list[Life] = field(default_factory=list)
    _asked: bool = False
    _stopped: int = 0

    async def run(self) -> int:
        """Run the job until it is not started again; returns the exit code."""
        plan: Plan | None = (self.hosts, self.ranks)
        while plan is not None:
            runner = self.make(*plan)
            life = await self._live(runner, plan)
            self._lives.append(life)
            why = why_not_again(self._lives, self.terms)
            if why is not None:
                if why:
                    self.output.say(why)
                return life.verdict.code
            if not life.kept:
                await asyncio.sleep(_PAUSE_S)
            plan = await self._find_room(self._leave_out(runner, life.verdict.how, plan))
            if plan is not None:
                self._tell_start(plan)
        return self._too_few()

    def _leave_out(self, runner: Runner, how: How, plan: Plan) -> set[str]:
        """Have hosts that were lost left out; returns those of the plan that are well."""
        lost = find_lost_hosts(runner.ranks, how, runner.planned)
        self.available.leave_out(lost)
        if how is How.ABSENT:
            self.available.doubt()
            return set()
        return {host.name for host in plan[0]} - lost

    async def _live(self, runner: Runner, plan: Plan) -> Life:
        """Run the job once."""
        self._asked = False
        watching = asyncio.create_task(self._watch(runner, plan))
        try:
            verdict = await runner.live()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        if not (self._asked and verdict.how is How.SAVED):
            runner.tell(verdict)
        return Life(verdict, begun=runner.ranks.begun, kept=runner.ranks.kept, asked=self._asked)

    async def _watch(self, runner: Runner, plan: Plan) -> None:
        """Look while the job runs whether there are other hosts for it."""
        before, looks = None, 0
        while self.available.changes:
            await asyncio.sleep(_LOOK_S)
            hosts = await self.available.find(self._find_used(runner) or {host.name for host in plan[0]})
            now = hosts, self._choose(hosts)
            looks = looks + 1 if now == before and self._is_better(runner, *now) else 0
            if looks >= (_LOOKS_OUTLIVING if self.terms.outlives else _LOOKS):
                self.hosts_changed(runner, *now)
            before = now

    def hosts_changed(self, runner: Runner, hosts: Hosts, ranks: int) -> None:
        """There are other hosts for a job that runs: it could have `ranks` ranks on them. Called until it has.

        Ranks that have saved something know how to save and end: they are asked to, and the job is started again.
        """
        if self._asked or not (runner.ranks.kept and runner.ranks.begun):
            return
        self._asked = True
        where = f" on {format_hosts(hosts)}" if hosts else ""
        self.output.say(f"there is room for {count_ranks(ranks)}{where}: the job saves, and is started again there.")
        runner.save_and_end()

    def _is_better(self, runner: Runner, hosts: Hosts, ranks: int) -> bool:
        """Would the job rather be on these hosts: with more ranks than it has, or as one in use is to be left?"""
        left = self._find_used(runner) - {host.name for host in hosts} if runner.planned else set()
        return bool(ranks) and (ranks > len(runner.ranks.expected) or bool(left))

    @staticmethod
    def _find_used(runner: Runner) -> set[str]:
        """The hosts that ranks are on."""
        return {name_host(rank, runner.ranks.hosts, runner.planned) for rank in runner.ranks.hosts}

    def _choose(self, hosts: Hosts) -> int:
        """How many ranks these hosts are given; 0 if that are too few."""
        if not self.hosts:
            return choose_ranks(None, self.terms)  # on this machine, however many slots that makes
        return choose_ranks(count_slots(hosts), self.terms)

    async def _find_room(self, trusted: set[str]) -> Plan | None:
        """Hosts and ranks for the next life; None if there is no room, also not after a while. trusted: see find()."""
        with self._stoppable():
            return await wait_for_room(
                lambda: self.available.find(trusted),
                self._choose,
                wait_s=self.terms.wait_s,
                may_grow=lambda: not self._stopped and self.available.changes,
                tell=lambda hosts: self.output.say(
                    f"{describe_slots(hosts, self.terms.least)}: waiting for others, up to {self.terms.wait_s:g} s "
                    f"(--elastic-timeout)."
                ),
            )

    def _tell_start(self, plan: Plan) -> None:
        hosts, ranks = plan
        where = f" on {format_hosts(hosts)}" if hosts else ""
        what = "from the last checkpoint" if self._has_checkpoint else "from the beginning: nothing has been saved"
        times = f"start {len(self._lives) + 1}"
        if in_vain := count_in_vain(self._lives):
            times += f", {in_vain} in a row ended before anything was saved"
        self.output.say(f"starting again with {count_ranks(ranks)}{where}, {what} ({times}).")

    def _too_few(self) -> int:
        if self._stopped:
            self.output.say(f"{signal.Signals(self._stopped).name}: not started again.")
            return 128 + self._stopped
        what = f"there are not as many slots as are needed, {self.terms.least} (--min-np)"
        if self._has_checkpoint:
            self.output.say(f"{what}: ended with exit code {TRY_AGAIN}; the same command goes on from what was saved.")
            return TRY_AGAIN
        self.output.say(f"{what}, and nothing has been saved: it is not started again.")
        return 1

    @property
    def _has_checkpoint(self) -> bool:
        return any(life.kept for life in self._lives) or bool(
            self.folder and CheckpointDirectory(self.folder).numbers()
        )

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Hear signals while no runner does."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        self._stopped = int(number)
