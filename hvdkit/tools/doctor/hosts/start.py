"""The command lines that start an agent, and what their failures mean."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import hvdkit
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.hosts.seen import Failure

#: What a login prints to show that it works.
LOGIN = "hvdkit-doctor-login"
#: Variables that Python itself needs before it can read others from its input.
_FIRST = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
_SSH = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=2"),
    *("-o", "ServerAliveCountMax=3"),
)


def ssh_argv(login: str, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Build the line that runs a command over ssh, and never asks for anything. options: -p and -i, if given."""
    return ["ssh", *_SSH, *options, "--", login, shlex.join(command)]


def srun_argv(host: str, command: Sequence[str]) -> list[str]:
    """Build the line that runs a command in this Slurm allocation, beside what runs there already."""
    options = ("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--export=ALL", "--input=all")
    return ["srun", *options, f"--nodelist={host}", *command]


def agent_command(environ: Mapping[str, str], python: str = "") -> list[str]:
    """Build the agent's own line, for this Python on another host."""
    first = [f"{name}={environ[name]}" for name in _FIRST if environ.get(name)]
    return ["env", *first, python or sys.executable, "-m", "hvdkit.tools.doctor.agent"]


def with_own_folder(environ: Mapping[str, str], folder: str = "", prefix: str = "") -> dict[str, str]:
    """Make this very hvdkit importable for what is started, where it is run from a checkout and not installed."""
    folder = folder or str(Path(hvdkit.__file__).parents[1])
    path = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if folder in path or Path(folder).is_relative_to(prefix or sys.prefix):
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *path])}


def explain(host: str, failure: Failure, via: str, options: Sequence[str] = ()) -> Finding:
    """Tell why there is no agent on a host, from what ssh, srun or Python said. options: that ssh was given."""
    name, seen, cure = next(
        (cause[1:] for cause in _CAUSES if re.search(cause[0], failure.said, re.IGNORECASE)),
        _unknown(host, failure, via, options),
    )
    words = {"host": host, "python": sys.executable}
    return Finding("error", name, _fill(seen, words), _fill(cure, words), (host,))


def _unknown(host: str, failure: Failure, via: str, options: Sequence[str]) -> tuple[str, str, str]:
    lines = [line.strip() for line in failure.said.splitlines() if line.strip()]
    said = lines[-1] if lines else "nothing"
    how = "did not answer in time" if failure.status is None else f"ended with status {failure.status}"
    by_hand = ssh_argv(host, ["hostname"], options) if via == "ssh" else srun_argv(host, ["hostname"])
    return f"{via}-fails", f"{via} to {{host}} {how}; it said: {said}", f"Try it by hand: {shlex.join(by_hand)}"


def _fill(text: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    return text


# Before "permission denied" of ssh itself.
_NO_PYTHON = (
    r"(python\S*|env):.*(no such file|permission denied|cannot execute)|command not found",
    "python-missing",
    "There is no {python} on {host}.",
    "Put the environment where every host sees it at the same path, or make one there.",
)
#: What is found in the messages, the finding's name, what is seen, the cure.
_CAUSES = (
    (
        r"could not resolve hostname|name or service not known|unknown host",
        "name-unknown",
        "The name {host} leads to no address on this host.",
        "Check the spelling; a name has to be in DNS, in /etc/hosts or in ~/.ssh/config.",
    ),
    (
        r"host key verification failed|remote host identification has changed",
        "ssh-host-key",
        "ssh does not know the key of {host}, or another one, and would ask.",
        "Run once by hand: ssh {host} true; or have the site put the key into /etc/ssh/ssh_known_hosts.",
    ),
    _NO_PYTHON,
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
        "Nothing answers to ssh on {host}.",
        "Start sshd there, or set its port in ~/.ssh/config.",
    ),
    (
        r"timed out|no route to host|network is unreachable|connection closed by|not responding",
        "host-unreachable",
        "{host} does not answer: it is down, or a firewall drops what is sent to it.",
        "Check that it is up, and that its name leads to an address in a network that this host is in.",
    ),
    (
        r"no module named ['\"]?hvdkit",
        "hvdkit-missing",
        "{python} on {host} has no hvdkit.",
        "Install hvdkit there too, in the environment at the same path; what a login shell or a module sets is not set "
        "for a command over ssh.",
    ),
    (
        r"no module named",
        "hvdkit-missing",
        "{python} on {host} lacks packages that hvdkit needs.",
        "Install hvdkit there with pip, which brings them; over ssh no module or environment is loaded.",
    ),
    (
        r"error while loading shared libraries",
        "python-missing",
        "{python} on {host} lacks a library that a module brings here.",
        "Load the module in ~/.bashrc of that host, above any line that ends it for shells without a terminal.",
    ),
)
