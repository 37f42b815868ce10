"""A rank's life: start the command, relay, end it with everything it started, report."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .binding import Share, allowed_cpus, bind, plan_share
from .guard import Guard, catches
from .interfaces import has_fabric, read_interfaces
from .machine import look_around
from .orders import read_orders
from .place import Place, adapt_environment, may_be_outlived, name_process, plan_elastic_variables
from .prefix import Prefixer
from .stacks import StackTaker
from .stream import HOLD_S, Stream, open_terminal, set_window, write_all
from .topology import format_cpus
from .wire import (
    ASK,
    BYE,
    DOING,
    END,
    ENDED_BY_HVDRUN,
    GO,
    HELLO,
    NEWS,
    PAUSE,
    SAVE,
    SIGNAL,
    START,
    STDERR,
    STDOUT,
    STOP,
    WINDOW,
    Control,
    Gone,
)

KILL_AFTER_S = 2.0  # after SIGTERM
DRAIN_S = 0.5  # output may come this long after the command's end, from processes that it left
#: By exit code: how long hvdrun is waited for. 75, saved: as long as the other ranks may save, which hvdrun ends.
BYE_AFTER_S = {75: float("inf")}


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Make a function that, run in a child, has the system send it a signal when its parent ends; Linux only."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(1, int(number), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return ask


class Agent:
    """Runs the command until it has ended, with everything it started."""

    def __init__(self, place: Place, control: Control | None, log: int | None) -> None:
        self.place = place
        self.control, self.log = control, log
        self.prefix = b""
        self.deserted = False  # hvdrun has gone without a word
        self.told = ""  # why the rank is to end, if not by itself
        self.kill_at = 0.0
        self.child: subprocess.Popen[bytes] | None = None
        self.streams: list[Stream] = []
        self.terminal: int | None = None
        self.asked: list[tuple[bytes, StackTaker]] = []  # hvdrun wants to know what the rank is doing
        self.unread = False  # nobody takes the output any more
        self.news: socket.socket | None = None  # where the rank tells how far it is, and hears of others
        self.early: list[tuple[bytes, bytes]] = []  # what hvdrun has sent before the command was started
        self.elastic = False  # the others may go on without this rank, and wait for MPI to tell them of its end

    def run(self, command: list[str], environ: Mapping[str, str]) -> int:
        """Run the command; returns its exit code, or 128 + the signal that ended it."""
        wake, waker = os.pipe()
        for end in (wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(name, self._on_signal)
        orders = self._await_go(environ)
        self.elastic = may_be_outlived(environ)
        local_size = int(orders.get("local_size", self.place.local_size))
        one_host = orders.get("one_host", local_size in (0, self.place.size))
        self.prefix = (f"[{self.place.rank}] " if one_host else f"[{self.place.rank} {self.place.host}] ").encode()
        guard = Guard()  # launchers kill agents, and cannot know what the agents have started
        share = plan_share(allowed_cpus(), orders.get("cores", {}), local_size)
        variables = adapt_environment(environ, orders.get("variables", {}), share.threads)
        if environ.get("HVDKIT_ELASTIC") == "1":
            variables.update(plan_elastic_variables(self.place, command))
        self.news, target = socket.socketpair()
        target.set_inheritable(True)
        variables["HVDKIT_NEWS"] = (
            f"{target.fileno()}:{os.fstat(target.fileno()).st_ino}"  # see hvdkit.launcher_channel
        )
        problem = self._start(command, variables, orders.get("window"), share)
        target.close()
        if problem is not None:
            return self._finish(*problem)
        assert self.child is not None
        guard.watch(self.child.pid)
        start = {
            "pid": self.child.pid,
            "threads": variables["OMP_NUM_THREADS"],
            "cpus": format_cpus(share.cpus),
            "bound": share.bound,
        }
        self._send(START, json.dumps(start).encode())
        self._carry_out(self.early)
        self._relay(wake)
        self._signal_group(signal.SIGKILL)  # what the command has left behind
        guard.dismiss()
        status = self.child.wait()
        return self._finish(status if status >= 0 else 128 - status, "")

    def _await_go(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Say who and where this is, and wait until hvdrun has heard it from all ranks; returns its orders."""
        if self.control is None:
            return {}
        place = self.place
        hello: dict[str, Any] = {"rank": place.rank, "size": place.size, "host": place.host, "joins": place.joins}
        hello.update(process=name_process(environ), machine=look_around(environ))
        if self.control.address:
            hello.update(address=self.control.address, interfaces=read_interfaces(), fabric=has_fabric())
        self.control.send(HELLO, json.dumps(hello).encode())
        while True:
            try:
                frames = self.control.receive()
            except Gone:
                self.deserted = True
                raise
            self.early += frames
            kinds = [kind for kind, _ in self.early]
            if STOP in kinds or SIGNAL in kinds:
                raise Gone("hvdrun is ending the job")
            if GO in kinds:
                return read_orders(self.early.pop(kinds.index(GO))[1])

    def _start(
        self, command: list[str], variables: dict[str, str], window: list[int] | None, share: Share
    ) -> tuple[int, str] | None:
        """Start the command on its CPUs; returns (exit code, what is wrong) if it cannot be."""
        targets, opened = [-1, -1], []
        if window is not None:
            rows, columns, both = window
            columns -= len(self.prefix)
            variables.update(COLUMNS=str(columns), LINES=str(rows))
            self.terminal, inner = open_terminal(rows, columns)
            targets[0] = inner
            if both:
                targets[1] = inner
            self._add_stream(self.terminal, STDOUT, live=True)
        for number, kind in enumerate((STDOUT, STDERR)):
            if targets[number] < 0:
                source, targets[number] = os.pipe()
                self._add_stream(source, kind, live=False)
        opened = sorted(set(targets))
        try:
            with bind(share) as prevented:
                self.child = subprocess.Popen(
                    command,
                    env=variables,
                    stdout=targets[0],
                    stderr=targets[1],
                    start_new_session=True,
                    close_fds=False,  # MPICH's ranks talk to their launcher through an open file (PMI_FD)
                    preexec_fn=die_with_parent(os.getpid()),
                )
            if prevented:
                cpus = format_cpus(share.cpus)
                self._emit(STDERR, self.prefix + f"hvdkit: cannot be bound to CPUs {cpus}: {prevented}\n".encode())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return code, f"{command[0]} cannot be started: {error}"
        finally:
            for target in opened:
                os.close(target)
        return None

    def _add_stream(self, source: int, kind: bytes, *, live: bool) -> None:
        self.streams.append(Stream(source, kind, Prefixer(self.prefix, terminal=live), live=live, log=self.log))

    def _relay(self, wake: int) -> None:
        """Pass output and orders on until the command has ended and its output is drained."""
        assert self.child is not None
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        sources = {stream.source: stream for stream in self.streams}
        for source in sources:
            poll.register(source, select.POLLIN)
        controls = self.control.sources if self.control is not None else []
        for control in controls:
            poll.register(control, select.POLLIN)
        news = self.news.fileno() if self.news is not None else -1
        if self.news is not None:
            poll.register(news, select.POLLIN)
        drain_until = 0.0
        while True:
            busy = drain_until or self.kill_at or self.asked or any(stream.held_since for stream in sources.values())
            ready = [fd for fd, _ in poll.poll(50 if busy else 1000)]
            if wake in ready:
                os.read(wake, 4096)
                self._report_pause()
            if news in ready:
                words = self._read_news()
                if words:
                    self._send(NEWS, words)
                else:
                    poll.unregister(news)
            if self.control is None:
                for control in controls:
                    poll.unregister(control)
                controls = []
            elif set(controls) & set(ready):
                self._obey()
            for fd in ready:
                if fd in sources:
                    data = sources[fd].read()
                    if data is None:
                        poll.unregister(fd)
                        data = sources.pop(fd).finish()
                    self._emit_from(fd, data)
            self._answer()
            now = time.monotonic()
            for stream in sources.values():
                if stream.held_since and now - stream.held_since > HOLD_S:
                    stream.held_since = 0.0
                    self._emit(stream.kind, stream.flush())
            if self.kill_at and now > self.kill_at:
                self._signal_group(signal.SIGKILL)
                self.kill_at = 0.0
            if os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                drain_until = drain_until or now + DRAIN_S
                if not sources or now > drain_until:
                    for stream in sources.values():
                        self._emit(stream.kind, stream.finish())
                    return

    def _emit_from(self, fd: int, data: bytes) -> None:
        self._emit(next(stream.kind for stream in self.streams if stream.source == fd), data)

    def _read_news(self) -> bytes:
        """What the rank tells of itself; b"" if it will say no more."""
        assert self.news is not None
        try:
            return self.news.recv(4096)
        except ConnectionError:  # it has ended without listening
            return b""

    def _report_pause(self) -> None:
        """Tell hvdrun if the command has been stopped, or goes on."""
        assert self.child is not None
        with contextlib.suppress(ChildProcessError):  # it has ended
            news = os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if news is not None:
                self._send(PAUSE, str(news.si_status if news.si_code != os.CLD_CONTINUED else 0).encode())

    def _obey(self) -> None:
        assert self.control is not None
        try:
            frames = self.control.receive()
        except Gone as error:
            self._lose_control(str(error))
        else:
            self._carry_out(frames)

    def _carry_out(self, frames: Sequence[tuple[bytes, bytes]]) -> None:
        assert self.child is not None
        for kind, payload in frames:
            number = signal.Signals(int(payload)) if kind == SIGNAL else None
            if kind == STOP or (number == signal.SIGTERM and not catches(self.child.pid, number)):
                self._end_rank(ENDED_BY_HVDRUN)
            elif number is not None:
                self._pass_on(number)
            elif kind == SAVE and catches(self.child.pid, signal.SIGTERM):
                self._pass_on(signal.SIGTERM)
            elif kind == ASK:
                self.asked.append((payload, StackTaker(self.child.pid)))
            elif kind == NEWS and self.news is not None:
                with contextlib.suppress(OSError):  # it has ended, or never listens
                    self.news.send(payload, socket.MSG_DONTWAIT)
            elif kind == WINDOW and self.terminal is not None:
                rows, columns = json.loads(payload)
                set_window(self.terminal, rows, columns - len(self.prefix))

    def _answer(self) -> None:
        """Say what the rank is doing to whoever has asked, if that is known by now."""
        for question, taker in list(self.asked):
            found = taker.look()
            if found is not None:
                self.asked.remove((question, taker))
                self._send(DOING, json.dumps({"question": int(question), "processes": found}).encode())

    def _lose_control(self, why: str = "") -> None:
        if why:
            with contextlib.suppress(OSError):
                write_all(2, self.prefix + f"hvdkit: has lost hvdrun: {why}.\n".encode())
        if self.control is not None:
            self.control.clean_up()
        self.control = None
        self.deserted = self.unread = True
        self._end_rank("hvdrun is gone")

    def _end_rank(self, why: str) -> None:
        self.told = self.told or why
        self._signal_group(signal.SIGTERM)
        self.kill_at = self.kill_at or time.monotonic() + KILL_AFTER_S

    def _on_signal(self, number: int, frame: object) -> None:
        if self.child is None:
            raise SystemExit(128 + number)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self.told = self.told or f"the launcher sent {signal.Signals(number).name}"
        self._pass_on(signal.Signals(number))

    def _pass_on(self, number: signal.Signals) -> None:
        """Send the command a signal; and what it has started too, unless it has a handler and so its own idea of that.

        A training that is to save cannot do without the processes that load its data.
        """
        if self.child is not None and self.child.returncode is None and catches(self.child.pid, number):
            self.child.send_signal(number)
        else:
            self._signal_group(number)

    def _signal_group(self, number: signal.Signals) -> None:
        # Until the child is reaped its number, and so its group's, cannot be given to another process.
        if self.child is not None and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, number)

    def _emit(self, kind: bytes, data: bytes) -> None:
        if not data or self.unread:
            return
        if self.control is not None:
            self._send(kind, data)
            return
        try:
            write_all(1 if kind == STDOUT else 2, data)
        except OSError:
            self.unread = True
            self._end_rank("nobody reads the output any more")

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self.control is not None:
            try:
                self.control.send(kind, payload)
            except Gone:
                self._lose_control()

    def _finish(self, code: int, problem: str) -> int:
        for stream in self.streams:
            os.close(stream.source)
        last = next((stream for stream in reversed(self.streams) if stream.tail), None)
        tail, kind = (list(last.tail), last.kind) if last is not None else ([], STDERR)
        if problem:
            self._emit(STDERR, self.prefix + problem.encode() + b"\n")
            tail, kind = [problem.encode()], STDERR
        status = self.child.returncode if self.child is not None else code
        end = {
            "code": code,
            "signal": -status if status < 0 else 0,
            "told": self.told,
            "tail": [line.decode(errors="replace") for line in tail],
            "tail_of_stderr": kind == STDERR,
            "time": time.time(),
        }
        self._send(END, json.dumps(end).encode())
        if code and self.control is not None and not self.elastic:
            self._await_bye(code)
        return code

    def _await_bye(self, code: int) -> None:
        """Wait until hvdrun has drawn its conclusion: mpirun ends all other ranks as soon as this one is gone."""
        assert self.control is not None
        deadline, poll = time.monotonic() + BYE_AFTER_S.get(code, 10.0), select.poll()
        for source in self.control.sources:
            poll.register(source, select.POLLIN)
        try:
            while time.monotonic() < deadline:
                if poll.poll(200) and any(kind in (BYE, STOP) for kind, _ in self.control.receive()):
                    return
        except Gone:
            return
