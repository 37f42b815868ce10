"""An elastic job in the lab, and what it says while it runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.lab import Host, Lab
from hvdrun_job import alive
from listened import Listened


class Run(Listened):
    """One start of the job's command, on node1.

    ranks: those that have begun, by number: this machine's number of their process.
    commits: when the first one to say so had committed, and which step.
    """

    def __init__(self, lab: Lab, command: Sequence[str]) -> None:
        self._lab = lab
        self.commits: list[tuple[float, int]] = []
        self.ranks: dict[int, int] = {}
        super().__init__(lab.start("node1", ["sh", "-c", 'exec "$@" 2>&1', "sh", *command]))

    def hear(self, line: str) -> None:
        if found := re.match(r"\[\d+(?: \S+)?\] committed (\d+)", line):
            self.commits.append((time.monotonic(), int(found[1])))
        elif found := re.match(r"hvdrun: rank (\d+) on (\S+): pid (\d+)", line):
            pid = _outer(self._lab.hosts.get(found[2], self._lab.hosts["node1"]), int(found[3]))
            if pid:
                self.ranks[int(found[1])] = pid

    @property
    def began(self) -> dict[int, int]:
        """The ranks that train, or are about to: they have said so themselves. Their processes."""
        said = {int(number) for number in re.findall(r"^\[(\d+)(?: \S+)?\] pid ", self.output, re.MULTILINE)}
        return {number: pid for number, pid in list(self.ranks.items()) if number in said and alive(pid)}

    @property
    def coming(self) -> dict[int, int]:
        """Those on their way in."""
        began = self.began
        return {number: pid for number, pid in list(self.ranks.items()) if number not in began and alive(pid)}

    def describe(self) -> str:
        """What the job has said, and what all ranks are doing now."""
        stacks = self._lab.run("node1", [sys.executable, "-m", "hvdkit", "stacks"]).stdout
        return f"{self.output}\n{stacks}"

    def goes_on(self, since: float) -> bool:
        """Has it made steps since then? A word or two may have been on their way."""
        return len(self.commits) >= 3 and self.commits[-3][0] > since

    def end(self, seconds: float) -> int:
        """Wait for its end; returns its exit code."""
        self.wait_for(lambda: self.ended, seconds, "the end of the job")
        self._reader.join(5)
        return int(self.process.returncode)

    def kill(self) -> None:
        """End hvdrun, and with it all the rest."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _outer(host: Host, pid: int) -> int:
    """The number that a process of a host has on this machine; 0 if it has ended."""
    for outer in host.processes():
        with contextlib.suppress(OSError):
            found = re.search(r"^NSpid:.*\t(\d+)$", Path(f"/proc/{outer}/status").read_text(), re.MULTILINE)
            if found and int(found[1]) == pid:
                return outer
    return 0


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
