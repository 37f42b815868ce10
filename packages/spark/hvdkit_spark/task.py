"""A task of a barrier stage: it starts its rank as a process of its own, and reports how that ended.

The Python worker of Spark itself loads no framework: it is a forked process that Spark uses again for other tasks. The
tasks exchange the addresses of their ranks' stores by allGather(), and each then makes the same plan of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

from hvdkit.config import read_environment
from hvdkit.integrations.ranks import Offer, assign_ranks, find_gpu_variable, plan_variables
from hvdkit.launch.agent.session_reaper import SessionReaper, end_session
from hvdkit.launch.process import describe_status
from hvdkit.startup import plan_variables as plan_startup
from hvdkit.transport.addresses import is_loopback
from hvdkit_spark.output import ERROR, OUT, LineSender
from hvdkit_spark.reports import Report

_LOOK_S = 0.2
_EXIT_S = 10.0  # for a rank to end after it has sent its outcome
_LINES = 20  # number of lines of its output in the report of a rank that died


@dataclass(frozen=True)
class RankSpec:
    """The specification of a job, the same for every rank.

    function: pickled, with its arguments.
    env: variables added to the executor's.
    secret, name: see integrations/ranks.py.
    driver: a host that all executors reach.
    start_timeout: seconds for a rank to load torch.
    executable: the Python of the ranks; "" for that of the task.
    alias_horovod: are imports of Horovod redirected to hvdkit (HVDKIT_ALIAS_HOROVOD)?
    output_port: port at which the driver takes the lines of the ranks; 0 if it takes none.
    """

    function: bytes = field(repr=False)
    env: dict[str, str] = field(repr=False)
    secret: str = field(repr=False)
    name: str
    driver: str
    start_timeout: float
    executable: str = ""
    alias_horovod: bool = False
    output_port: int = 0


class Context(Protocol):
    """The methods of pyspark's BarrierTaskContext that a rank needs."""

    def partitionId(self) -> int:
        """Return the number of the task."""

    def allGather(self, message: str = "") -> list[str]:
        """Exchange messages; returns those of all tasks, by number. Every task calls it."""

    def resources(self) -> Any:
        """Map each resource to the addresses that this task has."""


def run_rank(spec: RankSpec, context: Context) -> Report:
    """Run the rank of this task to its end. Every task of the stage calls it."""
    index, host = context.partitionId(), socket.gethostname()
    with _connected(spec, index) as (lines, problem), _started(spec, index, lines) as process:
        offer, not_started = process.read_offer(spec.start_timeout)
        problem = problem or not_started
        if offer is not None:
            offer = replace(offer, gpus=read_gpus(context), gpu_variable=find_gpu_variable())
        message = {"offer": offer and asdict(offer), "problem": problem, "host": host}
        others = [json.loads(one) for one in context.allGather(json.dumps(message))]
        problems = [f"{one['problem']} (on {one['host']})" for one in others if one["problem"]]
        if problems:
            return Report(index, host, "not started", text="; ".join(dict.fromkeys(problems)))
        offers = [Offer(**{**one["offer"], "gpus": tuple(one["offer"]["gpus"])}) for one in others]
        if problem := find_loopback(offers, spec.driver):
            return Report(index, host, "not started", text=problem)
        rank, variables = plan_rank(spec, offers, index)
        process.rank = rank
        return process.run(rank, host, variables, spec.function)


def plan_rank(spec: RankSpec, offers: list[Offer], index: int) -> tuple[int, dict[str, str]]:
    """Plan all ranks; returns the rank of a task and its variables.

    The plan is the same on every task. offers: by number of the task.
    """
    assignments = assign_ranks(offers)
    first = offers[assignments[0].index]
    variables = plan_variables(assignments, first.address, first.port, spec.secret, spec.name)
    rank = next(each.rank for each in assignments if each.index == index)
    return rank, variables[rank]


def find_loopback(offers: list[Offer], driver: str) -> str:
    """Explain why ranks on other hosts cannot reach rank 0; "" if they can.

    offers: the first is the offer of rank 0. driver: see RankSpec.
    """
    first = offers[0]
    if not is_loopback(first.address) or len({offer.node for offer in offers}) == 1:
        return ""
    return (
        f"rank 0 on {first.node} is at {first.address}, which other hosts cannot reach: towards the driver, "
        f"{driver!r} (spark.driver.host), that host has no other address. Start Spark with spark.driver.host=ADDRESS, "
        "by which all executors reach the driver, and spark.driver.bindAddress=0.0.0.0 if the driver's host does not "
        "have that address itself."
    )


def read_gpus(context: Context) -> tuple[str, ...]:
    """Return the GPUs that Spark has given to this task (spark.task.resource.gpu.amount)."""
    gpu = context.resources().get("gpu")
    return tuple(gpu.addresses) if gpu is not None else ()


class _RankProcess:
    """The process of a rank. Its output goes to the task's stderr, which is the executor's, line by line.

    sender: sends these lines to the driver; None if the driver takes none.
    """

    def __init__(
        self, process: subprocess.Popen[str], connection: Connection, index: int, sender: LineSender | None
    ) -> None:
        self.rank: int | None = None
        self._process, self._connection, self._index, self._sender = process, connection, index, sender
        self._lines: deque[str] = deque(maxlen=_LINES)
        streams = [(OUT, process.stdout), (ERROR, process.stderr)]
        self._copying = [
            threading.Thread(target=self._copy, args=(kind, stream), daemon=True)
            for kind, stream in streams
            if stream is not None
        ]
        for thread in self._copying:
            thread.start()

    def _copy(self, kind: bytes, output: IO[str]) -> None:
        for line in output:
            self._lines.append(line.rstrip("\n"))
            label = f"task {self._index}" if self.rank is None else str(self.rank)
            labelled = f"[{label}] {line}" if line.endswith("\n") else f"[{label}] {line}\n"
            sys.stderr.write(labelled)
            sys.stderr.flush()
            if self._sender is not None:
                self._sender.send(kind, labelled)

    def _join(self, seconds: float) -> None:
        """Wait at most this long until all output is copied."""
        deadline = time.monotonic() + seconds
        for thread in self._copying:
            thread.join(max(0.0, deadline - time.monotonic()))

    def read_offer(self, timeout_s: float) -> tuple[Offer | None, str]:
        """Read the offer of the rank; if it has made none, return the reason."""
        answer = self._receive(timeout_s)
        if isinstance(answer, tuple):
            return Offer(self._index, socket.gethostname(), *answer), ""
        if isinstance(answer, str):
            return None, answer
        if self._process.poll() is None:
            return None, f"the process of task {self._index} has not started within {timeout_s:g} s"
        return None, f"the process of task {self._index} has not started: {self._describe_end()}"

    def run(self, rank: int, host: str, variables: dict[str, str], function: bytes) -> Report:
        """Make the rank call the function, and wait for its end."""
        with contextlib.suppress(OSError):  # it has died: the next read detects it
            self._connection.send((variables, function))
        answer = self._receive(None)
        if answer is None:
            return Report(rank, host, "died", text=f"the process of the rank has died: {self._describe_end()}")
        status, outcome = answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        return Report(rank, host, status, outcome)

    def _receive(self, timeout_s: float | None) -> Any:
        """Receive an object from the process; None if it has ended, or sends nothing in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            ended = self._process.poll() is not None
            try:
                if self._connection.poll(0 if ended else _LOOK_S):
                    return self._connection.recv()
            except (EOFError, OSError):
                return None
            if ended:
                return None
        return None

    def _describe_end(self) -> str:
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return f"it has closed its connection, and did not end within {_EXIT_S:g} s"
        self._join(1.0)
        last = "".join(f"\n    {line}" for line in tuple(self._lines))  # may still grow
        return describe_status(status) + (f". Its last lines:{last}" if last else "")

    def close(self) -> None:
        """End the process with all that it has started."""
        end_session(self._process.pid)
        self._process.wait()
        self._join(_EXIT_S)
        self._connection.close()


@contextlib.contextmanager
def _connected(spec: RankSpec, index: int) -> Iterator[tuple[LineSender | None, str]]:
    """Connect to the driver if it takes lines; yields the sender and, if the connection fails, the reason."""
    if not spec.output_port:
        yield None, ""
        return
    try:
        sender = LineSender(spec.driver, spec.output_port, spec.secret, index)
    except OSError as error:
        yield (
            None,
            f"the driver takes the output of the ranks (stdout=, stderr=) at {spec.driver} port {spec.output_port}, "
            f"which this executor cannot reach: {error}. Leave these arguments out, or let the executors connect to "
            "the driver's ports",
        )
        return
    try:
        yield sender, ""
    finally:
        sender.close()


@contextlib.contextmanager
def _started(spec: RankSpec, index: int, sender: LineSender | None) -> Iterator[_RankProcess]:
    """Start the process of a rank, and end it on exit. It is also ended when this task's process is killed."""
    ours, theirs = Pipe()
    descriptor = theirs.fileno()
    command = [spec.executable or sys.executable, "-m", "hvdkit_spark.rank", str(descriptor), spec.driver]
    reaper = SessionReaper()
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                env=plan_environment(spec, read_environment(), sys.path),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if sender is None else subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                pass_fds=(descriptor,),
            )
        reaper.watch(process.pid)
        rank = _RankProcess(process, ours, index, sender)
        try:
            yield rank
        finally:
            rank.close()
    finally:
        reaper.dismiss()


def plan_environment(spec: RankSpec, environ: dict[str, str], path: list[str]) -> dict[str, str]:
    """Plan the variables of a rank's process. path: sys.path of the task, to which Spark has added the job's files."""
    known = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    places = [place for place in path if place and not place.startswith(known)]
    alias = {"HVDKIT_ALIAS_HOROVOD": "1"} if spec.alias_horovod else {}
    variables = {**environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(places), **spec.env}
    return {**variables, **plan_startup(alias, variables)}
