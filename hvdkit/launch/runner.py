"""Run a job: start mpirun, listen to the agents, end everything at the first failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch.agent import wire
from hvdkit.launch.agent.guard import Guard, end_session
from hvdkit.launch.arrivals import Arrival, Orders, check_layout, plan_orders
from hvdkit.launch.control import Control
from hvdkit.launch.folders import OwnFolder
from hvdkit.launch.inquiry import Inquiries
from hvdkit.launch.job import Launch, format_shell_line
from hvdkit.launch.late import LateRanks
from hvdkit.launch.outliving import Outliving
from hvdkit.launch.output import Output
from hvdkit.launch.preflight import find_troubles
from hvdkit.launch.ranks import Ranks
from hvdkit.launch.restarting import name_host
from hvdkit.launch.verdict import How, Verdict, judge

# A failed rank and those that notice it report within milliseconds; one that only noticed leaves the cause a second.
_SETTLE_S, _CAUSE_S = 0.05, 1.0
_AGENTS_END_S = 2.7  # the agents kill after 2 s
_MPIRUN_ENDS_S, _MPIRUN_FINISHES_S = 0.5, 10.0
# Open MPI 5 does not always end at SIGTERM, but always at the second SIGINT.
_ESCALATION = ((signal.SIGTERM, 0.5), (signal.SIGINT, 0.1), (signal.SIGINT, 0.4), (signal.SIGKILL, 1.0))
_SAVED_END_S = 5.0
_TALK_HELD_S = 1.0
_LOOK_S = 1.0
# Of a busy machine, where the ssh that mpirun has started was faster than mpirun.
_HARMLESS = re.compile(rb"^\[\S+\] plm:ssh: Warning: setpgid\(.*\n", re.MULTILINE)


@dataclass
class Runner:
    """One job from its start to its end.

    build: makes the launch; is given the variables that lead the agents to hvdrun.
    command: what the ranks run, to show. addresses: see Control.open.
    verbose: tell about every start, and show what mpirun says at once.
    planned: (host, ranks) as they are to be placed; () if the user says by other means how they are.
    slots: of the planned hosts, where more ranks may be started later.
    networks: names of interfaces or subnets for what ranks on different hosts say to each other; () to choose.
    start_timeout_s: how long all ranks may take until they are there. bind: ranks to cores, see the setting.
    save_timeout_s: how long they may take to save and end, where they have a handler for SIGTERM and hvdrun gets one.
    least: ranks with which the job goes on when others die; 0 if it ends with the first. patience_s: how long it
    waits for a rank that hangs; 0 for ever.
    """

    build: Callable[[Mapping[str, str]], Launch]
    size: int
    environ: Mapping[str, str]
    command: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    verbose: bool = False
    logs: str = ""
    planned: tuple[tuple[str, int], ...] = ()
    slots: Mapping[str, int] = field(default_factory=dict)
    networks: tuple[str, ...] = ()
    start_timeout_s: float = 60.0
    bind: str = "auto"
    save_timeout_s: float = 25.0
    least: int = 0
    patience_s: float = 0.0
    output: Output = field(default_factory=Output)
    ranks: Ranks = field(init=False)
    _interrupted: int = 0
    _hurried: bool = False
    _ending: bool = False
    _talk: bytearray = field(default_factory=bytearray)
    _announced: set[int] = field(default_factory=set)
    _paused: set[int] = field(default_factory=set)
    _outliving: Outliving | None = None
    _released: bool = False
    _refused: str = ""
    _mpirun: int = 0
    _late: bool = False

    def __post_init__(self) -> None:
        self.ranks = Ranks(self.size)

    async def run(self) -> int:
        """Run the job and tell how it ended; returns the exit code."""
        verdict = await self.live()
        self.tell(verdict)
        return verdict.code

    def tell(self, verdict: Verdict) -> None:
        """Say how the job ended."""
        for line in verdict.lines:
            self.output.say(line)
        if self.verbose and not verdict.code:
            who = "the ranks that were left" if self.ranks.outlived else f"all {self.size} ranks"
            self.output.say(f"{who} ended well.")

    async def live(self) -> Verdict:
        """Run the job; returns how it ended."""
        self._news = asyncio.Event()
        self._inquiries = Inquiries(self._describe, lambda number: self._control.send_all(wire.ASK, number))
        self._control = Control(self.ranks, self._write, self._notice, self._inquiries.hear, elastic=self.least > 0)
        if self.least:
            self._outliving = Outliving(
                self.ranks,
                self._control,
                least=self.least,
                patience_s=self.patience_s,
                plan=lambda ranks: self._plan_orders({rank: self._control.arrivals[rank] for rank in ranks}).told,
                say=self.output.say,
            )
        folder = OwnFolder()
        self._name = folder.name
        self._late_ranks = LateRanks(self.ranks, self._inquiries.gather, self.output.say, self._notice, folder.name)
        try:
            await self._control.open(self.addresses, folder.path)
            await self._inquiries.open(folder.path)
            variables = {**self._control.variables, "HVDKIT_JOB": f"{folder.name}@{socket.gethostname()}"}
            with self._signals():
                status = await self._run_mpirun(self.build(variables))
                self.ranks.fall_silent(*self._control.connected)
        finally:
            self._inquiries.close()
            await self._control.close()
            folder.close()
        if self.output.broken and not self.ranks.failures:
            return Verdict(128 + signal.SIGPIPE, how=How.TOLD)
        verdict = judge(
            self.ranks,
            status,
            interrupted=self._interrupted,
            refused=self._refused,
            late_s=self.start_timeout_s if self._late else 0.0,
            given_up=self._late_ranks.given_up,
            logs=self.logs,
            together=self.output.together,
        )
        if verdict.show_launcher or (verdict.code == 0 and not self._interrupted and not self._cut_off()):
            self._show_talk()
        return verdict

    def save_and_end(self) -> None:
        """Have the ranks save when they next can, and end; they go on until then."""
        self._control.send_all(wire.SAVE)

    async def _run_mpirun(self, launch: Launch) -> int:
        environ = {**self.environ, **launch.variables}
        for name in launch.removed:
            environ.pop(name, None)
        guard = Guard(_ESCALATION)
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL if os.isatty(0) else None,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self._control.restore_files,
        )
        guard.watch(process.pid)
        self._mpirun = process.pid
        assert process.stdout is not None
        listening = asyncio.create_task(self._listen(process.stdout))
        ended = asyncio.create_task(process.wait())
        try:
            await self._watch(ended)
            await self._end(process, ended)
        finally:
            end_session(process.pid)  # with mpirun killed, its ssh would stay
            status = await ended
            guard.dismiss()
            await asyncio.wait([listening], timeout=0.5)
            listening.cancel()
        return status

    async def _watch(self, ended: asyncio.Task[int]) -> None:
        """Return when the job is over, one way or another."""
        start_by = asyncio.get_running_loop().time() + self.start_timeout_s
        while not ended.done():
            self._announce()
            if self._interrupted or self.output.broken:
                return
            left = None if self._released else start_by - asyncio.get_running_loop().time()
            if not self._released:
                self._release()
                self._late = left is not None and left <= 0 and not self._released
                if self._refused or self._late:
                    return
            if self._outliving is not None:
                self._outliving.look()
            self._late_ranks.look()
            if self._late_ranks.given_up:
                return
            if self._outliving is not None and self._outliving.too_few:
                await self._wait_until(lambda: self.ranks.settled or bool(self._interrupted), self.save_timeout_s)
                return
            if self.ranks.saved:
                await self._wait_until(lambda: self.ranks.settled, _SAVED_END_S)
                return
            if self.ranks.failures:
                await asyncio.sleep(_SETTLE_S)
                if self._outliving is not None and self._outliving.goes_on():
                    continue
                if not self.ranks.cause_is_sure:
                    await self._wait_until(lambda: self.ranks.cause_is_sure or bool(self._interrupted), _CAUSE_S)
                return
            if self.ranks.all_well:
                # Of a host that has fallen silent mpirun would hear no more, and never end.
                await asyncio.wait([ended], timeout=_MPIRUN_ENDS_S if self._cut_off() else _MPIRUN_FINISHES_S)
                return
            news = asyncio.create_task(self._news.wait())
            look = _LOOK_S if self.patience_s else None
            pause = min((each for each in (left, look, self._late_ranks.left_s()) if each is not None), default=None)
            await asyncio.wait([ended, news], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
        # The agents' last words may still be on their way.
        await self._wait_until(lambda: not self._control.connected, 0.3)
        self._announce()

    def _release(self) -> None:
        """Let the ranks start, if all of them are there and where they should be."""
        self._refused = self._control.problem
        if self._refused or len(self._control.arrivals) < self.size:
            return
        self._refused = check_layout(self.planned, self.ranks.hosts)
        if self._refused:
            return
        try:
            orders = self._plan_orders(self._control.arrivals)
        except LaunchError as error:
            self._refused = str(error)
            return
        for trouble in find_troubles((one.host, one.machine) for one in self._control.arrivals.values()):
            self.output.say(trouble)
        if self.verbose and orders.why:
            self.output.say(f"{orders.why}.")
        self._control.release(orders.told)
        self._released = True
        if self._outliving is not None:
            self._outliving.begin(self._mpirun)

    def _plan_orders(self, arrivals: Mapping[int, Arrival]) -> Orders:
        names = {rank: name_host(rank, {}, self.planned) for rank in arrivals}
        slots = {rank: self.slots.get(name, 0) for rank, name in names.items()}
        return plan_orders(arrivals, self.environ, self.networks, self.output.window, self.bind, slots)

    def _cut_off(self) -> bool:
        return self._outliving is not None and self._outliving.cut_off

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        """End whatever is left: the ranks through their agents, then mpirun."""
        self._ending = True
        if self._interrupted == signal.SIGTERM:
            self._control.send_all(wire.SIGNAL, str(int(signal.SIGTERM)).encode())
            await self._wait_until(lambda: self.ranks.settled or self._hurried, self.save_timeout_s)
        self._control.stop()
        await self._wait_until(lambda: not self._control.connected, _AGENTS_END_S)
        if self.ranks.hosts:
            await asyncio.wait([ended], timeout=_MPIRUN_ENDS_S)
        for number, pause in _ESCALATION:
            if ended.done():
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            await asyncio.wait([ended], timeout=pause)

    async def _wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not true() and (left := deadline - asyncio.get_running_loop().time()) > 0:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        """Take in what mpirun itself says. It is shown unless it turns out to be about the end of a rank."""
        while data := await stream.read(1 << 16):
            self._talk += data
            if self.verbose:
                self._show_talk()
            else:
                asyncio.get_running_loop().call_later(_TALK_HELD_S, self._show_talk_if_running)

    def _show_talk_if_running(self) -> None:
        if not self._ending and not self.ranks.failures:
            self._show_talk()

    def _show_talk(self) -> None:
        self.output.repeat(_HARMLESS.sub(b"", self._talk))
        self._talk.clear()

    def _write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        self.output.write(rank, is_stderr, data)
        if self.output.broken:
            self._news.set()

    def _describe(self) -> dict[str, object]:
        """What this job is, for those who ask."""
        hosts = {str(rank): host for rank, host in sorted(self.ranks.hosts.items())}
        return {"name": self._name, "command": shlex.join(self.command), "size": self.size, "hosts": hosts}

    def _notice(self) -> None:
        self._news.set()

    def _announce(self) -> None:
        for rank in sorted(self.ranks.started.keys() - self._announced) if self.verbose else ():
            start = self.ranks.started[rank]
            cores = f"{'bound to' if start.bound else 'may use'} CPUs {start.cpus}"
            place = f"rank {rank} on {self.ranks.hosts[rank]}"
            self.output.say(f"{place}: pid {start.pid}, {cores}, OMP_NUM_THREADS={start.threads}")
            self._announced.add(rank)
        changed = self.ranks.paused.keys() ^ self._paused
        for rank in sorted(changed & self.ranks.hosts.keys()):  # of one that is outlived nothing is to be told
            place = f"rank {rank} on {self.ranks.hosts[rank]}"
            if rank in self.ranks.paused:
                name, pid = signal.Signals(self.ranks.paused[rank]).name, self.ranks.started[rank].pid
                self.output.say(f"{place} was stopped by {name}; to have it go on: kill -CONT {pid}")
            else:
                self.output.say(f"{place} goes on.")
        self._paused = set(self.ranks.paused)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        passed_on = (signal.SIGUSR1, signal.SIGUSR2)
        for number in ending:
            loop.add_signal_handler(number, self._interrupt, number)
        for number in passed_on:
            loop.add_signal_handler(number, self._control.send_all, wire.SIGNAL, str(int(number)).encode())
        loop.add_signal_handler(signal.SIGWINCH, self._resize)
        try:
            yield
        finally:
            for number in (*ending, *passed_on, signal.SIGWINCH):
                loop.remove_signal_handler(number)

    def _interrupt(self, number: signal.Signals) -> None:
        self._interrupted = self._interrupted or int(number)
        self._hurried = self._hurried or number != signal.SIGTERM  # which schedulers send more than once
        self._news.set()

    def _resize(self) -> None:
        window = self.output.window
        if window is not None:
            self._control.send(0, wire.WINDOW, json.dumps(window[:2]).encode())


def describe_launch(launch: Launch) -> str:
    """Show a launch without the secret that leads agents to hvdrun."""
    hidden = {name: value for name, value in launch.variables.items() if not name.startswith("HVDKIT_CONTROL")}
    return format_shell_line(Launch(launch.argv, hidden, launch.removed))
