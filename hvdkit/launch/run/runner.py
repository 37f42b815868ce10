"""Run a job: start the launcher, supervise the ranks through their agents, end all at the first failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.agent import wire
from hvdkit.launch.agent.session_reaper import SessionReaper, end_session
from hvdkit.launch.agent.shm_cleanup import remove_dead_segments
from hvdkit.launch.agent.stream import format_prefix
from hvdkit.launch.elastic.monitor import ElasticMonitor
from hvdkit.launch.introspect.init_watchdog import InitWatchdog
from hvdkit.launch.introspect.metrics import MetricsServer
from hvdkit.launch.introspect.query_server import QueryServer
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.job import Job, Launch
from hvdkit.launch.plan.registration import StartOrders, check_layout, plan_start_orders
from hvdkit.launch.plan.resources import check_gpus, count_gpus_in_use, find_problems
from hvdkit.launch.run.agent_probes import AgentProbes
from hvdkit.launch.run.output import Interruption, LauncherOutput, Output
from hvdkit.launch.run.stopped import LOOK_S, StoppedProcesses
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.outcome import JobResult, advise, conclude, conclude_without_output
from hvdkit.launch.state.ranks import Phase, Ranks, name_rank
from hvdkit.launch.state.runtime_dir import RuntimeDirectory
from hvdkit.launch.state.standard_input import StandardInput
from hvdkit.launch.state.tracebacks import Tracebacks

# A failed rank and ranks that notice it report within milliseconds; if only the latter have, the cause has a second to
# report.
_SETTLE_S, _CAUSE_S = 0.05, 1.0
_INTERRUPTED_END_S = 5.0  # time for ranks to handle Ctrl-C
_AGENTS_END_S = 2.7  # agents kill their ranks after 2 s
_MPIRUN_ENDS_S, _MPIRUN_FINISHES_S = 0.5, 10.0
# Open MPI 5 does not always end at SIGTERM, but always at the second SIGINT.
_ESCALATION = ((signal.SIGTERM, 0.5), (signal.SIGINT, 0.1), (signal.SIGINT, 0.4), (signal.SIGKILL, 1.0))
_SAVED_END_S, _CHECK_S = 5.0, 1.0


class Runner:
    """One job from its start to its end.

    build: makes the launch from the variables with hvdrun's address, for the agents, and the job's directory.
    job: the plan of the job.
    output: of the ranks and of hvdrun.
    interruption: see run_once.
    stdin: for rank 0.
    """

    def __init__(
        self,
        build: Callable[[Mapping[str, str], str], Launch],
        job: Job,
        output: Output,
        interruption: Interruption,
        stdin: StandardInput | None = None,
    ) -> None:
        self.job, self.output = job, output
        self._interruption = interruption
        self.ranks = Ranks(job.ranks)
        self._build = build
        self._control = ControlServer(self.ranks, self._write, elastic=job.survives, stdin=stdin)
        self._changed = self._control.changed
        self._queries = QueryServer(self._describe, self._control.take_stacks)
        self._metrics = MetricsServer(self.ranks, self._describe)
        self._elastic = ElasticMonitor(self.ranks, self._control, job, self._plan_orders, output.say)
        self._stopped = StoppedProcesses(
            self.ranks, output.say, local=job.local, agents_may_stop_s=self._elastic.hang_timeout_s
        )
        self._probes = AgentProbes(
            self.ranks, self._control.connected, output.say, agents_may_stop_s=self._elastic.hang_timeout_s
        )
        output.prefix_of = self._format_prefix
        self._tracebacks = Tracebacks(output.write, self._format_prefix)
        output.flush_ranks = self._tracebacks.flush
        self._init_watchdog = InitWatchdog(
            *(self.ranks, self._control.take_stacks, output.say, self._changed.set, self._describe),
            fixed=job.elasticity is not Elasticity.SURVIVE,
        )
        self._name = ""
        self._since = time.time()
        self._started = self._ending = self._late = self._failed = False
        self._refused = ""
        self._launcher, self._prefixes = "mpirun", ""
        self._session = 0  # of the launcher and the processes that it has started
        self._launcher_output = LauncherOutput(
            output, at_once=job.verbose, wanted=lambda: not self._ending and not self.ranks.failures
        )
        self._reported_starts: set[int] = set()
        self._reported_pauses: set[int] = set()

    async def run(self) -> int:
        """Run the job and report how it ended; returns the exit code."""
        with self._interruption.handled():
            result = await self.run_once()
        self.report(result)
        return result.code

    def report(self, result: JobResult) -> None:
        """Print how the job ended."""
        for line in result.lines:
            self.output.say(line)
        if self.job.verbose and not result.code:
            who = "the remaining ranks" if self.ranks.left_behind else f"all {self.ranks.size} ranks"
            self.output.say(f"{who} ended with exit code 0.")

    async def run_once(self) -> JobResult:
        """Run the job until its end, or until a signal, which the caller's `interruption` handles, ends it."""
        self._interruption.on_signal = self._changed.set
        folder = RuntimeDirectory()
        self._name = folder.name
        try:
            await self._control.open(self.job.addresses, folder.path)
            await self._queries.open(folder.path)
            await self._metrics.open(self.job.metrics_port, self.output.note)
            variables = {**self._control.variables, "HVDKIT_JOB": f"{folder.name}@{socket.gethostname()}"}
            with self._signals_for_ranks():
                status = await self._run_launcher(self._build(variables, folder.path), folder)
                self.ranks.mark_unreachable(*self._control.connected)
        finally:
            self._init_watchdog.close()
            self._queries.close()
            self._metrics.close()
            await self._control.close()
            folder.close()
        self._tracebacks.flush()  # needed even if the result has no lines
        result = self._conclude(status)
        if result.show_launcher or (result.code == 0 and not self._elastic.partitioned):
            self._launcher_output.show()
        await self._queries.report_end(result.code)
        return result

    def _conclude(self, status: int) -> JobResult:
        failed = self._failed or any(end.failed for end in self.ranks.ended.values())
        if self.output.broken and not failed and not self._interruption.number:
            return conclude_without_output(self.output.broken, len(self.ranks.hosts))
        return conclude(
            self.ranks,
            status,
            launcher=self._launcher,
            advice=advise(self.job.ranks, local=self.job.local, files=resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            elastic=self.job.survives and self.ranks.size > 1 and self.job.config.engine != "horovod",
            interrupted=self._interruption.number,
            refused=self._refused,
            late_s=self.job.start_timeout_s if self._late else 0.0,
            given_up=self._init_watchdog.given_up,
            logs=self.job.logs,
            together=self.output.together,
            shows=self.output.shows,
        )

    def save_and_end(self) -> None:
        """Make the ranks save when they next can, and end; they continue until then."""
        self._control.send_all(wire.SAVE)

    async def _run_launcher(self, launch: Launch, folder: RuntimeDirectory) -> int:
        environ = {**self.job.environ, **launch.variables}
        for name in launch.removed:
            environ.pop(name, None)
        self._prefixes = launch.variables.get("HVDKIT_PREFIX", "")
        self._launcher = os.path.basename(launch.argv[0])
        reaper = SessionReaper(_ESCALATION, folder.path, folder.lock)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,  # rank 0 gets hvdrun's stdin through its agent
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._control.restore_files,
            )
        except OSError as error:
            reaper.dismiss()
            raise LaunchError(
                f"{launch.argv[0]} cannot be started: {error.strerror}. Run its command line by hand: hvdrun --dry-run "
                "prints it.",
                code="launcher-not-started",
            ) from None
        reaper.watch(process.pid)
        self._session = process.pid
        assert process.stdout is not None
        reading = asyncio.create_task(self._launcher_output.read(process.stdout))
        ended = asyncio.create_task(process.wait())
        try:
            await self._supervise(ended)
            await self._end(process, ended)
        finally:
            end_session(process.pid)  # if mpirun was killed, its ssh would remain
            status = await ended
            reaper.dismiss()
            if status:  # Open MPI's ranks may have left their segments to mpirun
                remove_dead_segments()
            await asyncio.wait([reading], timeout=0.5)
            reading.cancel()
        return status

    async def _supervise(self, ended: asyncio.Task[int]) -> None:
        """Wait until the job has ended or must be ended. ended: the launcher's end."""
        start_by = asyncio.get_running_loop().time() + self.job.start_timeout_s
        while not ended.done():
            self._announce()
            if self._interruption.number or self.output.broken:
                return
            if not self._started and not self._await_registrations(start_by):
                return
            self._elastic.check()
            self._stopped.check(self._launcher, self._session)
            if not self.job.local:
                self._probes.check()
            self._init_watchdog.check()
            if self._init_watchdog.given_up:
                return
            if await self._is_over(ended):
                return
            await self._wait_for_change(ended, start_by)
        # The last reports of the agents may not have arrived yet.
        await self._changed.wait_until(lambda: not self._control.connected, 0.3)
        self._announce()

    def _await_registrations(self, start_by: float) -> bool:
        """Start the ranks once all have registered; returns False if that is no longer possible."""
        self._start_ranks()
        self._late = not self._started and asyncio.get_running_loop().time() >= start_by
        return not self._refused and not self._late

    async def _is_over(self, ended: asyncio.Task[int]) -> bool:
        """Must the job end because of the ranks' reports?"""
        if self._elastic.too_few:
            saving_s = self.job.save_timeout_s
            await self._changed.wait_until(lambda: self.ranks.finished or bool(self._interruption.number), saving_s)
            return True
        if self.ranks.saved:
            await self._changed.wait_until(lambda: self.ranks.finished, _SAVED_END_S)
            return True
        if self.ranks.failures:
            await asyncio.sleep(_SETTLE_S)
            if self._elastic.continue_without_failed():
                return await self._is_over(ended)
            await self._changed.wait_until(
                lambda: self.ranks.cause_is_certain or bool(self._interruption.number), _CAUSE_S
            )
            return True
        if self.ranks.succeeded:
            # mpirun would wait for ever for a host that does not answer.
            await asyncio.wait([ended], timeout=_MPIRUN_ENDS_S if self._elastic.partitioned else _MPIRUN_FINISHES_S)
            return True
        return False

    async def _wait_for_change(self, ended: asyncio.Task[int], start_by: float) -> None:
        changed = asyncio.create_task(self._changed.wait())
        limits = [
            None if self._started else start_by - asyncio.get_running_loop().time(),
            _CHECK_S if self._elastic.hang_timeout_s else LOOK_S,
            self._init_watchdog.left_s(),
        ]
        timeout = min((limit for limit in limits if limit is not None), default=None)
        await asyncio.wait([ended, changed], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        self._changed.clear()

    def _start_ranks(self) -> None:
        """Let the ranks start their commands, if all have registered from the planned hosts."""
        self._refused = self._control.problem
        if self._refused or len(self._control.arrivals) < self.ranks.size:
            return
        self._refused = check_layout(self.job.planned, self.ranks.hosts)
        if self._refused:
            return
        resources = [(one.host, one.resources) for one in self._control.arrivals.values()]
        try:
            troubles = check_gpus(resources, self.job.gpu_sharing)
            orders = self._plan_orders(self._control.arrivals.keys())
        except LaunchError as error:
            self._refused = str(error)
            return
        for trouble in [*troubles, *find_problems(resources)]:
            self.output.say(trouble)
        if self.job.verbose and orders.why:
            self.output.say(f"{orders.why}.")
        self._control.release(orders.by_rank)
        self._started = True
        self._elastic.begin(self._session)

    def _plan_orders(self, ranks: Iterable[int]) -> StartOrders:
        arrivals = {rank: self._control.arrivals[rank] for rank in ranks}
        held = {rank: order["cores"] for rank, order in self._control.orders.items()}
        return plan_start_orders(arrivals, self.job, self.output.window, self._name, held)

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        """End the remaining ranks through their agents, then mpirun. Agents that are lost meanwhile have not failed."""
        self._ending, self._failed = True, bool(self.ranks.failures)
        if self._interruption.number in (signal.SIGTERM, signal.SIGINT) and self._started:
            self._control.send_all(wire.SIGNAL, str(self._interruption.number).encode())
            by_user = self._interruption.number == signal.SIGINT
            await self._changed.wait_until(
                lambda: (self.ranks.all_ended if by_user else self.ranks.finished) or self._interruption.hurried,
                _INTERRUPTED_END_S if by_user else self.job.save_timeout_s,
            )
        self._control.stop()
        await self._changed.wait_until(lambda: not self._control.connected, _AGENTS_END_S)
        if self.ranks.hosts:
            await asyncio.wait([ended], timeout=_MPIRUN_ENDS_S)
        for number, pause in _ESCALATION:
            if ended.done():
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            await asyncio.wait([ended], timeout=pause)

    def _write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        if self.ranks.size > 1 and self.output.shows(rank):
            self._tracebacks.pass_on(rank, is_stderr, data)
        else:
            self.output.write(rank, is_stderr, data)
        if self.output.broken:
            self._changed.set()

    def _format_prefix(self, rank: int) -> bytes:
        """Write the prefix of a rank's lines, as its agent does."""
        order = self._control.orders.get(rank, {})
        host = "" if order.get("one_host", True) else self.ranks.states[rank].host
        return format_prefix(rank, host, self._prefixes)[1]

    def _describe(self) -> dict[str, object]:
        """Describe this job for `hvdkit stacks` and other commands."""
        hosts = {str(rank): host for rank, host in sorted(self.ranks.hosts.items())}
        return {
            "name": self._name,
            "command": shlex.join(self.job.command),
            "size": self.ranks.size,
            "hosts": hosts,
            "gpus": count_gpus_in_use((one.host, one.resources) for one in self._control.arrivals.values()),
            "since": self._since,
            "state": "ending"
            if self._ending or self._interruption.number
            else "running"
            if self._started
            else "starting",
        }

    def _announce(self) -> None:
        if self.job.verbose:
            for rank, state in sorted(self.ranks.states.items()):
                if state.start is not None and rank not in self._reported_starts:
                    start = state.start
                    cores = f"{'bound to' if start.bound else 'may use'} CPUs {start.cpus}"
                    who = name_rank(self.ranks, rank)
                    self.output.say(f"{who}: pid {start.pid}, {cores}, OMP_NUM_THREADS={start.threads}")
                    self._reported_starts.add(rank)
        paused = self.ranks.paused
        for rank in sorted(paused ^ self._reported_pauses):
            state = self.ranks.states[rank]
            if rank in paused and state.start is not None:
                name, pid = signal.Signals(state.paused_by).name, state.start.pid
                self.output.say(
                    f"{name_rank(self.ranks, rank)} was stopped by {name}; to continue it: kill -CONT {pid}"
                )
            elif state.phase not in (Phase.ENDED, Phase.LOST, Phase.LEFT_BEHIND):
                self.output.say(f"{name_rank(self.ranks, rank)} continues.")
        self._reported_pauses = paused

    @contextlib.contextmanager
    def _signals_for_ranks(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        passed_on = (signal.SIGUSR1, signal.SIGUSR2)
        for number in passed_on:
            loop.add_signal_handler(number, self._control.send_all, wire.SIGNAL, str(int(number)).encode())
        loop.add_signal_handler(signal.SIGWINCH, self._resize)
        try:
            yield
        finally:
            for number in (*passed_on, signal.SIGWINCH):
                loop.remove_signal_handler(number)

    def _resize(self) -> None:
        window = self.output.window
        if window is not None:
            self._control.send(0, wire.WINDOW, json.dumps(window[:2]).encode())
