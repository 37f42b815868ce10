"""Follow a job from the queue to its end, showing its log."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdkit.tools.submit.scheduler import State

#: Sites ask not to be asked more often.
ASK_EVERY_S = 10.0
_READ_EVERY_S = 0.5
#: Of answers in a row that did not come, before a job counts as forgotten by its scheduler.
_MOST_SILENCE = 6
#: A shared file system may show the last lines this much later.
LAG_S = 2.0


@dataclass
class Follower:
    """Shows what a job does until it has ended.

    ask: tells its state, or None. show: takes bytes of the log. say: takes a line about the job.
    log: its file; None where `read_log` is a command that prints it. offset: bytes of an older log, not to be shown.
    """

    ask: Callable[[], State | None]
    show: Callable[[bytes], None]
    say: Callable[[str], None]
    log: Path | None
    offset: int = 0
    read_log: tuple[str, ...] = ()
    ask_every_s: float = ASK_EVERY_S
    lag_s: float = LAG_S

    def follow(self) -> State:
        """Return the job's last state; one with code None if it was forgotten before anybody could read it."""
        told, silence = "", 0
        while True:
            state = self.ask()
            silence = 0 if state else silence + 1
            if silence >= _MOST_SILENCE:
                self._read_until(self.lag_s)
                return State("ended", "forgotten by its scheduler")
            if state is None or state.phase == "waiting":
                if state and state.text != told:
                    self.say(state.text)
                    told = state.text
                self._read_until(self.ask_every_s)
                continue
            if state.phase == "running" and told != "running":
                self.say(state.text)
                told = "running"
            if self.log is None:
                self._run_reader(state)
            if state.phase == "ended":
                self._read_until(self.lag_s)
                return state
            self._read_until(self.ask_every_s)

    def _read_until(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self._read()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_READ_EVERY_S, left))

    def _read(self) -> None:
        if self.log is None:
            return
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, 2)
                if size < self.offset:
                    self.offset = 0  # begun anew
                file.seek(self.offset)
                while data := file.read(1 << 16):
                    self.offset += len(data)
                    self.show(data)
        except OSError:
            return  # not there yet, or the file system is slow to show it

    def _run_reader(self, state: State) -> None:
        """Let the scheduler's own command print the log, once; it ends when the job does."""
        if not self.read_log:
            return
        with subprocess.Popen(self.read_log, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while data := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                self.show(data)
        if process.returncode == 0:
            self.read_log = ()
