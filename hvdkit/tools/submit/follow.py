"""A job and its scheduler: the commands of schedulers, submission, queries of the state, and the log."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import SubmitError
from hvdkit.launch.process import run_program
from hvdkit.tools.submit.job import BatchJob


@dataclass(frozen=True)
class State:
    """The state of a job.

    phase: waiting, running or ended.
    text: the scheduler's own word.
    code: exit code of an ended job; None if the scheduler does not report it.
    """

    phase: str
    text: str
    code: int | None = None


@dataclass(frozen=True)
class Scheduler:
    """A scheduler's commands.

    title: its name for messages.
    write: writes the script of a job.
    submit: the command line, which reads a script from standard input.
    read_id: reads the job's id from the output of `submit`; "" without an id.
    ask: makes the command line that prints a job's state.
    read_state: reads the output of `ask`; None if the job is missing.
    cancel: makes the command line that ends a job.
    read_log: makes the command line that follows the log; None if the log is a file.
    sees_files: whether jobs have the files of the host on which they are submitted, so that missing ones are an error;
        False for jobs in container images.
    """

    title: str
    write: Callable[[BatchJob], str]
    submit: tuple[str, ...]
    read_id: Callable[[str], str]
    ask: Callable[[str], tuple[str, ...]]
    read_state: Callable[[str], State | None]
    cancel: Callable[[str], tuple[str, ...]]
    read_log: Callable[[str], tuple[str, ...]] | None = None
    sees_files: bool = True


def first_match(pattern: str) -> Callable[[str], str]:
    """Make a function that returns the first group of a pattern in a text; "" without a match."""

    def find(text: str) -> str:
        found = re.search(pattern, text)
        return found.group(1) if found else ""

    return find


_SUBMIT_S, _ASK_S = 120.0, 60.0
#: Sites ask users to poll no more often.
ASK_EVERY_S = 10.0
_READ_EVERY_S = 0.5
#: Failed polls in a row after which the job counts as unknown to its scheduler.
_MOST_SILENCE = 6
#: A shared file system may show the last lines this much later.
LAG_S = 2.0


@dataclass
class Follower:
    """Prints the log of a job until it has ended.

    ask: returns its state, or None.
    show: prints bytes of the log.
    say: prints a line about the job.
    log: its file; None if `read_log` is a command that prints it.
    offset: number of bytes of an older log to skip.
    read_log: the command that prints the log.
    ask_every_s: seconds between two queries of the state.
    lag_s: seconds by which a shared file system may show the last lines late.
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
        """Return the job's last state; with code None if the scheduler no longer has it."""
        told, silence = "", 0
        while True:
            state = self.ask()
            silence = 0 if state else silence + 1
            if silence >= _MOST_SILENCE:
                self._read_until(self.lag_s)
                return State("ended", "no longer known to its scheduler")
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
                    self.offset = 0  # truncated
                file.seek(self.offset)
                while data := file.read(1 << 16):
                    self.offset += len(data)
                    self.show(data)
        except OSError:
            return  # not written yet, or not visible yet on the file system

    def _run_reader(self, state: State) -> None:
        """Run the scheduler's own command that prints the log, once; it ends with the job."""
        if not self.read_log:
            return
        with subprocess.Popen(self.read_log, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while data := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                self.show(data)
        if process.returncode == 0:
            self.read_log = ()


def submit_script(scheduler: Scheduler, script: str) -> str:
    """Submit a script; returns the job's id.

    Raises SubmitError with the scheduler's message if it refuses the job, or an object of the job.
    """
    command = shlex.join(scheduler.submit)
    if shutil.which(scheduler.submit[0]) is None:
        raise SubmitError(
            f"{scheduler.submit[0]} is not on PATH. Run this on a host where {scheduler.title} jobs are submitted, "
            "or print the script with --dry-run and submit it there."
        )
    answer = run_program(scheduler.submit, text=script, timeout_s=_SUBMIT_S)
    if answer.status is None:
        raise SubmitError(
            f"{command} did not answer within {_SUBMIT_S:.0f} s. Check whether the job is queued before trying again."
        )
    said = answer.output.strip()
    job_id = scheduler.read_id(answer.stdout)
    if answer.status and job_id:  # kubectl continues after an object that it could not create
        raise SubmitError(
            f"{command} refused a part of the job, with status {answer.status}: {said}. Job {job_id} exists, and "
            f"may run what an earlier job of its name has left. Remove both and submit again: "
            f"{shlex.join(scheduler.cancel(job_id))}"
        )
    if answer.status:
        raise SubmitError(f"{command} refused the job, with status {answer.status}: {said or 'no message'}")
    if not job_id:
        raise SubmitError(f"{command} accepted the job, but printed no job id: {said!r}. Look for it in the queue.")
    return job_id


def query_state(scheduler: Scheduler, job_id: str) -> State | None:
    """Query the state of a job; None without an answer."""
    return scheduler.read_state(run_program(scheduler.ask(job_id), timeout_s=_ASK_S).stdout)
