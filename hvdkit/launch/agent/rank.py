"""Run the command of a rank: start it, relay its output, end it with all its processes, report how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import wire
from .host_info import (
    Share,
    allowed_cpus,
    bind,
    format_cpus,
    has_fabric,
    hold_free_ports,
    plan_share,
    probe_host,
    read_interfaces,
)
from .input_pipe import InputPipe
from .rank_identity import RankIdentity, adapt_environment, name_process, plan_elastic_variables, survivors_continue
from .session_reaper import SessionReaper, catches, die_with_parent, end_session
from .stacks import StackCollector
from .stream import HOLD_S, LINE_BYTES, Log, Prefixer, Stream, format_prefix, open_terminal, set_window, write_all
from .wire import ControlConnection, HvdrunLost

KILL_AFTER_S = 2.0  # after SIGTERM
DRAIN_S = 0.5  # time for output of remaining processes after the command's end
CLOSE_S = 10.0  # time for hvdrun to read the rank's last frames
#: Exit code -> time to wait for hvdrun. With 75 the other ranks may still be saving, until hvdrun ends them.
BYE_AFTER_S = {75: float("inf")}
#: Signals that do not end the job: a signal that arrives before the command's start is delivered right after it.
_KEPT = (signal.SIGUSR1, signal.SIGUSR2)


class Agent:
    """Runs the command until it and all its processes have ended."""

    def __init__(self, identity: RankIdentity, control: ControlConnection | None, log: Log | None) -> None:
        self.identity = identity
        self.control, self.log = control, log
        self.prefix = self.shown_prefix = b""
        self.held_ports = hold_free_ports(identity.rank) if control is not None else []  # held until this process ends
        self.hvdrun_lost = False  # the connection has ended without an order to stop
        self.ended_by = ""  # what ended the rank, as a clause; "" if it ends by itself
        self.is_signalled = False  # by the launcher, to end
        self.kill_at = 0.0
        self.child: subprocess.Popen[bytes] | None = None
        self.streams: list[Stream] = []
        self.terminal: int | None = None
        self.input = InputPipe() if control is not None and identity.rank == 0 else None
        self.stack_requests: list[tuple[bytes, StackCollector]] = []  # from hvdrun, not answered yet
        self.output_closed = False  # the output cannot be relayed any more
        self.channel: socket.socket | None = None  # to the rank, see hvdkit.launcher_channel
        self.held_event = b""  # the beginning of an incomplete message
        self.early_frames: list[tuple[bytes, bytes]] = []  # received before the command was started
        self.elastic = False  # the other ranks may continue without this rank, and wait until MPI reports its end

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
        self.elastic = survivors_continue(environ)
        local_size = int(orders.get("local_size", self.identity.local_size))
        one_host = orders.get("one_host", local_size in (0, self.identity.size))
        host = "" if one_host else self.identity.host
        wish = environ.get("HVDKIT_PREFIX", "")
        self.prefix, self.shown_prefix = format_prefix(self.identity.rank, host, wish)
        reaper = SessionReaper()  # launchers kill agents, but not the processes that agents have started
        share = plan_share(allowed_cpus(), orders.get("cores", {}), local_size)
        variables = adapt_environment(environ, orders.get("variables", {}), share.threads)
        if environ.get("HVDKIT_ELASTIC") == "1":
            variables.update(plan_elastic_variables(self.identity, command))
        self.channel, target = socket.socketpair()
        target.set_inheritable(True)
        variables["HVDKIT_LAUNCHER_CHANNEL"] = f"{target.fileno()}:{os.fstat(target.fileno()).st_ino}"
        problem = self._start(command, variables, orders.get("window"), share)
        target.close()
        if problem is not None:
            return self._finish(*problem)
        assert self.child is not None
        reaper.watch(self.child.pid)
        threads, cpus = variables["OMP_NUM_THREADS"], format_cpus(share.cpus)
        start = {"pid": self.child.pid, "threads": threads, "cpus": cpus, "bound": share.bound}
        self._send(wire.START, json.dumps(start).encode())
        if self.input is not None:
            self._send(wire.STDIN)
        self._execute(self.early_frames)
        self._relay(wake)
        end_session(self.child.pid)  # the command's remaining processes, in whatever process group
        reaper.dismiss()
        status = self.child.wait()
        return self._finish(status if status >= 0 else 128 - status, "")

    def _await_go(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Register with hvdrun, and wait until all ranks have registered; returns the start order."""
        if self.control is None:
            return {}
        identity = self.identity
        hello: dict[str, Any] = {"rank": identity.rank, "size": identity.size, "host": identity.host}
        hello.update(joins=identity.joins)
        hello.update(process=name_process(environ), machine=probe_host(environ))
        hello.update(ports=[holder.getsockname()[1] for holder in self.held_ports])
        if self.control.address:
            hello.update(address=self.control.address, interfaces=read_interfaces(), fabric=has_fabric())
        self.control.send(wire.HELLO, json.dumps(hello).encode())
        while True:
            try:
                frames = self.control.receive()
            except HvdrunLost:
                self.hvdrun_lost = True
                raise
            self.early_frames += frames
            kinds = [kind for kind, _ in self.early_frames]
            if any(
                kind == wire.STOP or (kind == wire.SIGNAL and int(number) not in _KEPT)
                for kind, number in self.early_frames
            ):
                raise HvdrunLost("hvdrun is ending the job")
            if wire.GO in kinds:
                return wire.read_start_order(self.early_frames.pop(kinds.index(wire.GO))[1])

    def _start(
        self, command: list[str], variables: dict[str, str], window: list[int] | None, share: Share
    ) -> tuple[int, str] | None:
        """Start the command on its CPUs; returns (exit code, problem) if that fails."""
        targets = [-1, -1]
        # rank 0 has hvdrun's stdin, other ranks have none; without hvdrun it is the launcher's
        source = self.input.source if self.input else subprocess.DEVNULL if self.control else None
        if window is not None:
            rows, columns, both = window
            columns -= len(self.prefix)
            variables.update(COLUMNS=str(columns), LINES=str(rows))
            self.terminal, inner = open_terminal(rows, columns)
            targets[0] = inner
            if both:
                targets[1] = inner
            self._add_stream(self.terminal, wire.STDOUT, live=True)
        for number, kind in enumerate((wire.STDOUT, wire.STDERR)):
            if targets[number] < 0:
                output, targets[number] = os.pipe()
                self._add_stream(output, kind, live=False)
        try:
            with bind(share) as prevented:
                self.child = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=source,
                    stdout=targets[0],
                    stderr=targets[1],
                    start_new_session=True,
                    close_fds=False,  # MPICH's ranks communicate with their launcher through an open file (PMI_FD)
                    preexec_fn=die_with_parent(os.getpid()),
                )
            if prevented:
                cpus = format_cpus(share.cpus)
                self._say(f"cannot bind the rank to CPUs {cpus}: {prevented}")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return code, f"{command[0]} cannot be started: {error}"
        finally:
            for target in {*targets, *([self.input.source] if self.input else [])}:
                os.close(target)
        return None

    def _add_stream(self, source: int, kind: bytes, *, live: bool) -> None:
        self.streams.append(Stream(source, kind, Prefixer(self.shown_prefix, terminal=live), live=live, log=self.log))

    def _relay(self, wake: int) -> None:
        """Relay output and signals until the command has ended and its output is drained."""
        assert self.child is not None and self.channel is not None
        poll = select.poll()
        sources = {stream.source: stream for stream in self.streams}
        controls = self.control.sources if self.control is not None else []
        events = self.channel.fileno()
        for source in (wake, *sources, *controls, events):
            poll.register(source, select.POLLIN)
        drain_until = 0.0
        while True:
            held = any(stream.held_since for stream in sources.values())
            busy = held or drain_until or self.kill_at or self.stack_requests
            if self.input is not None:
                self.input.register(poll)
            ready = [fd for fd, _ in poll.poll(50 if busy else 1000)]
            if self.input is not None and self.input.write(ready):
                self._send(wire.STDIN)
            if wake in ready:
                os.read(wake, 4096)
                self._report_pause()
            if events in ready:
                words = self._read_events()
                if words is None:
                    poll.unregister(events)
                elif words:
                    self._send(wire.EVENT, words)
            if self.control is None:
                for control in controls:
                    poll.unregister(control)
                controls = []
            elif set(controls) & set(ready):
                self._receive_frames()
            for fd in ready:
                if fd in sources:
                    stream = sources[fd]
                    data = stream.read()
                    if data is None:
                        poll.unregister(fd)
                        data = sources.pop(fd).finish()
                    self._emit(stream.kind, data)
            if self.log is not None and (problem := self.log.take_problem()):
                self._say(f"its log is incomplete from here on: {problem}")
            self._answer()
            now = time.monotonic()
            for stream in sources.values():
                if stream.held_since and now - stream.held_since > HOLD_S:
                    stream.held_since = 0.0
                    self._emit(stream.kind, stream.flush())
            if self.kill_at and now > self.kill_at:
                end_session(self.child.pid)
                self.kill_at = 0.0
            if os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                drain_until = drain_until or now + DRAIN_S
                if not sources or now > drain_until:
                    for stream in sources.values():
                        self._emit(stream.kind, stream.finish())
                    return

    def _read_events(self) -> bytes | None:
        """Read complete messages of the rank; None at their end. A message that is too long is dropped."""
        assert self.channel is not None
        try:
            data = self.channel.recv(4096)
        except ConnectionError:  # it has ended without listening
            return None
        if not data:
            return None
        words, newline, rest = (self.held_event + data).rpartition(b"\n")
        self.held_event = rest if len(rest) < LINE_BYTES else b""
        return words + newline

    def _report_pause(self) -> None:
        """Report that a signal has stopped the command, or that it continues."""
        assert self.child is not None
        with contextlib.suppress(ChildProcessError):  # it has ended
            change = os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if change is not None:
                self._send(wire.PAUSE, str(change.si_status if change.si_code != os.CLD_CONTINUED else 0).encode())

    def _receive_frames(self) -> None:
        assert self.control is not None
        try:
            frames = self.control.receive()
        except HvdrunLost as error:
            self._lose_control(str(error))
        else:
            self._execute(frames)

    def _execute(self, frames: Sequence[tuple[bytes, bytes]]) -> None:
        assert self.child is not None
        for kind, payload in frames:
            number = signal.Signals(int(payload)) if kind == wire.SIGNAL else None
            if kind == wire.STOP or (number == signal.SIGTERM and not catches(self.child.pid, number)):
                self._end_rank(wire.ENDED_BY_HVDRUN)
            elif number is not None:
                if number == signal.SIGINT:
                    self.ended_by = self.ended_by or wire.ENDED_BY_HVDRUN
                self._pass_on(number)
            elif kind == wire.SAVE and catches(self.child.pid, signal.SIGTERM):
                self._pass_on(signal.SIGTERM)
            elif kind == wire.ASK:
                self.stack_requests.append((payload, StackCollector(self.child.pid)))
            elif kind == wire.STDIN and self.input is not None:
                self.input.feed(payload)
            elif kind == wire.EVENT and self.channel is not None:
                with contextlib.suppress(OSError):  # it has ended, or does not listen
                    self.channel.send(payload, socket.MSG_DONTWAIT)
            elif kind == wire.WINDOW and self.terminal is not None:
                rows, columns = json.loads(payload)
                set_window(self.terminal, rows, columns - len(self.prefix))

    def _answer(self) -> None:
        """Answer the requests for stacks whose stacks are complete."""
        for query, collector in list(self.stack_requests):
            stacks = collector.collect()
            if stacks is not None:
                self.stack_requests.remove((query, collector))
                self._send(wire.STACKS, json.dumps({"query": int(query), "processes": stacks}).encode())

    def _lose_control(self, why: str) -> None:
        with contextlib.suppress(OSError):
            write_all(2, self.prefix + f"hvdkit: ending the rank: {why}.\n".encode())
        self.control = None
        self.hvdrun_lost = self.output_closed = True
        self._end_rank("the connection to hvdrun was lost")

    def _end_rank(self, why: str) -> None:
        self.ended_by = self.ended_by or why
        self._signal_group(signal.SIGTERM)
        self.kill_at = self.kill_at or time.monotonic() + KILL_AFTER_S

    def _on_signal(self, number: int, frame: object) -> None:
        if self.child is None:
            raise SystemExit(128 + number)
        if number not in _KEPT:
            self.is_signalled = True
            self.ended_by = self.ended_by or f"the launcher sent {signal.Signals(number).name}"
        self._pass_on(signal.Signals(number))

    def _pass_on(self, number: signal.Signals) -> None:
        """Forward a signal to the command if it has a handler, else to its process group.

        A training that saves on the signal needs its processes that load data. SIGINT is always sent to the group, as
        by a terminal: a shell has a handler, and waits for the processes that it has started.
        """
        running = self.child is not None and self.child.returncode is None
        if self.child is not None and running and number != signal.SIGINT and catches(self.child.pid, number):
            self.child.send_signal(number)
        else:
            self._signal_group(number)

    def _signal_group(self, number: signal.Signals) -> None:
        # Until the child is reaped, no other process or group can get its number.
        if self.child is not None and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, number)

    def _emit(self, kind: bytes, data: bytes) -> None:
        if not data or self.output_closed:
            return
        if self.control is not None:
            self._send(kind, data)
            return
        try:
            write_all(1 if kind == wire.STDOUT else 2, data)
        except OSError:
            self.output_closed = True
            self._end_rank("its output cannot be written any more")

    def _say(self, text: str) -> None:
        self._emit(wire.STDERR, self.prefix + f"hvdkit: {text}\n".encode())

    def _send(self, kind: bytes, payload: bytes = b"") -> None:
        if self.control is not None:
            try:
                self.control.send(kind, payload)
            except HvdrunLost as error:
                self._lose_control(str(error))

    def _finish(self, code: int, problem: str) -> int:
        for stream in self.streams:
            os.close(stream.source)
        last = next((stream for stream in reversed(self.streams) if stream.tail), None)
        tail, kind = (list(last.tail), last.kind) if last is not None else ([], wire.STDERR)
        if problem:
            self._emit(wire.STDERR, self.prefix + problem.encode() + b"\n")
            tail, kind = [problem.encode()], wire.STDERR
        status = self.child.returncode if self.child is not None else code
        end = {
            "code": code,
            "signal": -status if status < 0 else 0,
            "ended_by": self.ended_by,
            "tail": [line.decode(errors="replace") for line in tail],
            "tail_of_stderr": kind == wire.STDERR,
            "time": time.time(),
        }
        self._send(wire.END, json.dumps(end).encode())
        if code and self.control is not None and not self.elastic:
            self._await_bye(code)
        if self.control is not None:
            self.control.finish(CLOSE_S, lambda: self.is_signalled)
        return code

    def _await_bye(self, code: int) -> None:
        """Wait until hvdrun has concluded how the job ends: mpirun ends all other ranks as soon as this rank ends."""
        assert self.control is not None
        deadline, poll = time.monotonic() + BYE_AFTER_S.get(code, 10.0), select.poll()
        for source in self.control.sources:
            poll.register(source, select.POLLIN)
        try:
            while time.monotonic() < deadline:
                if poll.poll(200) and any(kind in (wire.BYE, wire.STOP) for kind, _ in self.control.receive()):
                    return
        except HvdrunLost:
            return
