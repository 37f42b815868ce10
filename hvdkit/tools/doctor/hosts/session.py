"""Starts an agent on a host: command lines, the session with it, and the findings for its failures.

The session is JSON lines over the standard streams of ssh or srun. ssh encrypts them and needs no other open port:
doctor has to work even if connections between the hosts do not. The authenticated frames of rank agents would prove
nothing here, because their secret would come by the same streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import hvdkit
from hvdkit.launch.launchers import ssh_options
from hvdkit.launch.plan.environment import PYTHON_VARIABLES
from hvdkit.launch.process import kill_group
from hvdkit.launch.state.waiting import time_limit
from hvdkit.tools.doctor.collect.probes import read_object
from hvdkit.tools.doctor.findings import Finding
from hvdkit.tools.doctor.survey import Failure

#: Output of a login that works.
LOGIN = "hvdkit-doctor-login"
_CONNECT_S = 5


def ssh_argv(login: str, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Build the command line that runs a command over ssh without questions. options: -p and -i, if given."""
    return ["ssh", *ssh_options(options, timeout_s=_CONNECT_S), "--", login, shlex.join(command)]


def srun_argv(host: str, command: Sequence[str]) -> list[str]:
    """Build the command line that runs a command in this Slurm allocation, beside its running steps."""
    options = ("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--export=ALL", "--input=all")
    return ["srun", *options, f"--nodelist={host}", *command]


def agent_command(environ: Mapping[str, str], python: str = "") -> list[str]:
    """Build the command line of the agent, for this Python on another host; its variables come by its input."""
    first = [f"{name}={environ[name]}" for name in PYTHON_VARIABLES if environ.get(name)]
    return ["env", *first, python or sys.executable, "-m", "hvdkit.tools.doctor.hosts.agent"]


def with_own_folder(environ: Mapping[str, str], folder: str = "", prefix: str = "") -> dict[str, str]:
    """Make this hvdkit importable in started processes, if it runs from a checkout and is not installed."""
    folder = folder or str(Path(hvdkit.__file__).parents[1])
    path = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if folder in path or Path(folder).is_relative_to(prefix or sys.prefix):
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *path])}


def explain(host: str, failure: Failure, via: str, options: Sequence[str] = ()) -> Finding:
    """Explain why a host has no agent, from the output of ssh, srun or Python.

    host: its name.
    failure: the failure of its agent.
    via: "ssh" or "srun".
    options: of ssh.
    """
    for pattern, name, seen, cure in (*OF_PYTHON, *OF_SSH) if via == "ssh" else OF_PYTHON:
        if re.search(pattern, failure.said, re.IGNORECASE):
            words = {"host": host, "python": sys.executable}
            return Finding.error(name, seen.format(**words), cure.format(**words), (host,))
    lines = [line.strip() for line in failure.said.splitlines() if line.strip()]
    said = lines[-1] if lines else "nothing"
    how = "did not answer in time" if failure.status is None else f"ended with status {failure.status}"
    by_hand = ssh_argv(host, ["hostname"], options) if via == "ssh" else srun_argv(host, ["hostname"])
    seen = f"{via} to {host} {how}; last line of its output: {said}"
    return Finding.error(f"{via}-fails", seen, f"Try: {shlex.join(by_hand)}", (host,))


#: A pattern for messages of a shell or of Python, the finding's name, its text, the cure.
OF_PYTHON = (
    (
        r"(python\S*|env):.*(no such file|permission denied|cannot execute)|command not found",
        "python-missing",
        "There is no {python} on {host}.",
        "Put the environment on a file system that all hosts share, or create it there at the same path.",
    ),
    (
        r"no module named ['\"]?hvdkit",
        "hvdkit-missing",
        "hvdkit is not installed for {python} on {host}.",
        "Install hvdkit there too, in the environment at the same path; variables of a login shell or a module are not "
        "set for commands over ssh.",
    ),
    (
        r"no module named",
        "hvdkit-missing",
        "{python} on {host} lacks packages that hvdkit needs.",
        "Install hvdkit there with pip, which installs them; over ssh no module or environment is loaded.",
    ),
    (
        r"error while loading shared libraries",
        "python-missing",
        "{python} on {host} lacks a shared library, which a module provides on this host.",
        "Load the module in ~/.bashrc of that host, above any line that returns for non-interactive shells.",
    ),
)
#: The same for messages of ssh. Matched last: "permission denied" may also be about Python.
OF_SSH = (
    (
        r"could not resolve hostname|name or service not known|unknown host",
        "name-unknown",
        "The name {host} resolves to no address on this host.",
        "Check the spelling; the name must be in DNS, in /etc/hosts or in ~/.ssh/config.",
    ),
    (
        r"host key verification failed|remote host identification has changed",
        "ssh-host-key",
        "The host key of {host} is unknown to ssh or has changed.",
        "Run once: ssh {host} true; or add the key to /etc/ssh/ssh_known_hosts.",
    ),
    (
        r"permission denied|no supported authentication",
        "ssh-login",
        "ssh to {host} asks for a password.",
        "Run: ssh-keygen (if there is no ~/.ssh/id_*), then: ssh-copy-id {host}. Inside an allocation start with srun "
        "or mpirun, which need no ssh.",
    ),
    (
        r"connection refused",
        "ssh-refused",
        "{host} refuses connections to its ssh port.",
        "Start sshd there, or give its port with -p or in ~/.ssh/config.",
    ),
    (
        r"timed out|no route to host|network is unreachable|connection closed by|not responding",
        "host-unreachable",
        "{host} does not answer: it is down, or a firewall drops packets to it.",
        "Check that it is up, and that its name resolves to an address that this host can reach.",
    ),
)


_LAST_LINES = 40
_END_S, _POLL_S = 2.0, 0.01


class AgentLost(Exception):
    """Raised if the agent did not start, or has ended. failure: the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


@dataclass(frozen=True)
class AgentSession:
    """An agent, and the process that starts it; close() ends both.

    noise: a file for its stderr, and for the output of a shell's start-up files.
    """

    process: subprocess.Popen[bytes]
    noise: BinaryIO
    lines: asyncio.StreamReader
    stdin: asyncio.WriteTransport
    stdout: asyncio.ReadTransport

    @classmethod
    async def open(cls, argv: Sequence[str], environ: Mapping[str, str]) -> AgentSession:
        """Start an agent; raises AgentLost if that fails."""
        noise, pipe = tempfile.TemporaryFile(buffering=0), subprocess.PIPE  # noqa: SIM115  (close() closes it)
        try:
            process = subprocess.Popen(
                argv, env=dict(environ), stdin=pipe, stdout=pipe, stderr=noise, start_new_session=True
            )
        except OSError as error:
            raise AgentLost(Failure(127, str(error))) from None
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=sys.maxsize)
        try:
            stdout, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
            stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        except BaseException:  # Ctrl-C: only this function knows the process so far
            kill_group(process.pid)
            process.wait()
            raise
        return cls(process, noise, lines, stdin, stdout)

    async def await_hello(self, timeout_s: float) -> None:
        """Wait until the agent accepts requests; raises AgentLost."""
        while "hello" not in await self._read(timeout_s):
            pass

    async def ask(self, request: str, timeout_s: float, **arguments: Any) -> Any:
        """Send a request and wait for the answer; raises AgentLost, also if the host does not read."""
        self.stdin.write((json.dumps({"do": request, **arguments}) + "\n").encode())
        reply = await self._read(timeout_s)
        if "error" in reply:
            raise AgentLost(Failure(0, f"the agent's request {request!r} failed: {reply['error']}"))
        return reply.get("answer")

    async def close(self) -> None:
        """End the agent, by closing its input, and its process group."""
        if not self.stdin.is_closing():
            self.stdin.abort()
        await self._end(_END_S)
        self.stdout.close()
        self.noise.close()

    async def _read(self, timeout_s: float) -> dict[str, Any]:
        try:
            async with time_limit(timeout_s):
                async for line in self.lines:
                    if message := read_object(line.decode(errors="replace")):
                        return message
                    self.noise.write(line)
        except asyncio.TimeoutError:
            await self._end(0.0)
            raise self._describe_loss(None) from None
        await self._end(_END_S)
        raise self._describe_loss(self.process.returncode)

    def _describe_loss(self, status: int | None) -> AgentLost:
        self.noise.seek(0)
        lines = self.noise.read().decode(errors="replace").splitlines(keepends=True)
        return AgentLost(Failure(status, "".join(lines[-_LAST_LINES:])))

    async def _end(self, wait_s: float) -> None:
        """Kill the process group when its leader has ended, at the latest after `wait_s`."""
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                async with time_limit(wait_s):
                    while self.process.poll() is None:
                        await asyncio.sleep(_POLL_S)
        finally:  # also after a second Ctrl-C
            kill_group(self.process.pid)
            self.process.wait()
