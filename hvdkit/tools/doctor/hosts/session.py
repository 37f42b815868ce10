"""Start an agent on a host: command lines, the session with it, and the findings for its failures.

The session is JSON lines over the standard streams of ssh or srun. ssh encrypts them and needs no other open port:
doctor has to work where connections between the hosts do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.launch.launchers import ssh_options
from hvdkit.launch.process import kill_group
from hvdkit.tools.doctor.collect.probes import read_object
from hvdkit.tools.doctor.findings import Finding
from hvdkit.tools.doctor.survey import Failure

#: What a login prints to show that it works.
LOGIN = "hvdkit-doctor-login"
_CONNECT_S = 5
#: Variables that Python itself needs before it can read others from its input.
_FIRST = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


def ssh_argv(login: str, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Build the command line that runs a command over ssh without questions. options: -p and -i, if given."""
    return ["ssh", *ssh_options(options, timeout_s=_CONNECT_S), "--", login, shlex.join(command)]


def srun_argv(host: str, command: Sequence[str]) -> list[str]:
    """Build the command line that runs a command in this Slurm allocation, beside what runs there."""
    options = ("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--export=ALL", "--input=all")
    return ["srun", *options, f"--nodelist={host}", *command]


def agent_command(environ: Mapping[str, str], python: str = "") -> list[str]:
    """Build the command line of the agent, for this Python on another host."""
    first = [f"{name}={environ[name]}" for name in _FIRST if environ.get(name)]
    return ["env", *first, python or sys.executable, "-m", "hvdkit.tools.doctor.hosts.agent"]


def with_own_folder(environ: Mapping[str, str], folder: str = "", prefix: str = "") -> dict[str, str]:
    """Make this very hvdkit importable for what is started, where it is run from a checkout and not installed."""
    folder = folder or str(Path(hvdkit.__file__).parents[1])
    path = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if folder in path or Path(folder).is_relative_to(prefix or sys.prefix):
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *path])}


def explain(host: str, failure: Failure, via: str, options: Sequence[str] = ()) -> Finding:
    """Explain why there is no agent on a host, from the output of ssh, srun or Python. options: for ssh."""
    causes = (*OF_PYTHON, *OF_SSH) if via == "ssh" else OF_PYTHON
    name, seen, cure = next(
        (cause[1:] for cause in causes if re.search(cause[0], failure.said, re.IGNORECASE)),
        _unknown(host, failure, via, options),
    )
    words = {"host": host, "python": sys.executable}
    return Finding.error(name, _fill(seen, words), _fill(cure, words), (host,))


def _unknown(host: str, failure: Failure, via: str, options: Sequence[str]) -> tuple[str, str, str]:
    lines = [line.strip() for line in failure.said.splitlines() if line.strip()]
    said = lines[-1] if lines else "nothing"
    how = "did not answer in time" if failure.status is None else f"ended with status {failure.status}"
    by_hand = ssh_argv(host, ["hostname"], options) if via == "ssh" else srun_argv(host, ["hostname"])
    return f"{via}-fails", f"{via} to {{host}} {how}; last line of its output: {said}", f"Try: {shlex.join(by_hand)}"


def _fill(text: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    return text


#: What is found in the messages of a shell or of Python, the finding's name, what is seen, the cure.
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
#: The same for the messages of ssh. Looked for last: "permission denied" may be about Python too.
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
_END_S = 2.0


class AgentLost(Exception):
    """The agent did not start, or has ended. failure: why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


class AgentSession:
    """An agent, and the process that starts it; close() ends both. Raises AgentLost if that cannot be started."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        # Its stderr, and what a shell's start-up files print.
        self._noise = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (close() closes it)
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._noise,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentLost(Failure(127, str(error))) from None

    def await_hello(self, timeout_s: float) -> None:
        """Wait until the agent can be asked; raises AgentLost."""
        while "hello" not in self._read(timeout_s):
            pass

    def ask(self, request: str, timeout_s: float, **arguments: Any) -> Any:
        """Send a request and wait for the answer; raises AgentLost."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"do": request, **arguments}) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            raise self._lose(timed_out=False) from None
        reply = self._read(timeout_s)
        if "error" in reply:
            raise AgentLost(Failure(0, f"the agent's request {request!r} failed: {reply['error']}"))
        return reply.get("answer")

    def close(self) -> None:
        """End the agent, which ends when its input does, and its process group."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._end()
        self._process.stdout.close()
        self._noise.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            kill_group(self._process.pid)

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            for line in self._process.stdout:
                if message := read_object(line.decode(errors="replace")):
                    return message
                self._noise.write(line)
        finally:
            timer.cancel()
        raise self._lose(timed_out=expired.is_set())

    def _lose(self, *, timed_out: bool) -> AgentLost:
        self._end()
        self._noise.seek(0)
        lines = self._noise.read().decode(errors="replace").splitlines(keepends=True)
        return AgentLost(Failure(None if timed_out else self._process.returncode, "".join(lines[-_LAST_LINES:])))

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        kill_group(self._process.pid)
        self._process.wait()
