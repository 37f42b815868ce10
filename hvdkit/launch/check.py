"""What can be known to fail before anything is started, and what this machine can tell of the hosts."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.agent.interfaces import read_interfaces
from hvdkit.launch.hosts import Host
from hvdkit.launch.network import is_inside, matches, parse_interfaces

_SSH_TIMEOUT_S = 5.0
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
# Options of python that take a value of their own.
_TAKES_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_absolute(flag: str, path: str) -> str:
    """Make a path absolute. Raises LaunchError where the working directory that it is relative to has been removed."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise LaunchError(
            f"{flag} {path}: the working directory has been removed. cd to another one, and start from there."
        ) from None


@functools.cache
def resolve(name: str) -> tuple[str, ...]:
    """Find the addresses of a host; () if there is none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def is_local(host: Host) -> bool:
    """Tell whether a host is this machine."""
    if host.user:
        return False  # another account, even if here
    if host.name in ("localhost", socket.gethostname()):
        return True
    return any(_is_own(address) for address in resolve(host.name))


def check_hosts(hosts: Iterable[Host]) -> None:
    """Raise LaunchError naming the hosts that neither the name service nor ssh's own configuration knows."""
    unknown = [host.name for host in hosts if not is_known(host)]
    if unknown:
        raise LaunchError(
            f"Unknown host{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}. "
            "Check the spelling; a name has to be in DNS, /etc/hosts or ~/.ssh/config."
        )


def is_known(host: Host) -> bool:
    """Does the name service or ssh's own configuration know a host?"""
    return is_local(host) or bool(resolve(host.name)) or _ssh_knows(host)


def check_command(command: Sequence[str], path: str) -> None:
    """Raise LaunchError if the program, or the script that python is given, is not on this machine.

    path: the ranks' PATH.
    """
    program = command[0]
    if shutil.which(program, path=path) is None:
        if os.sep not in program:
            if program.endswith(".py") and Path(program).is_file():
                raise LaunchError(f"{program} is a script, not a program. Write: python {program}")
            raise LaunchError(f"There is no program {program!r} on PATH. Check the spelling, or give its full path.")
        if not Path(program).exists():
            raise LaunchError(f"There is no program {program!r}. Check the path; it is seen from {os.getcwd()}.")
        if Path(program).is_dir():
            raise LaunchError(f"{program!r} is a folder, not a program.")
        raise LaunchError(f"{program!r} is not executable. Run: chmod +x {program}, or: python {program}")
    script = find_script(command)
    if script and not Path(script).is_file():
        raise LaunchError(f"There is no script {script!r}. Check the path; it is seen from {os.getcwd()}.")


def find_script(command: Sequence[str]) -> str:
    """Find the .py file that a python command line runs; "" if it runs something else."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return ""
    words = iter(command[1:])
    for word in words:
        if word in _TAKES_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word if word.endswith(".py") else ""
        elif word in ("-", "-c", "-m") or (word[1] != "-" and word[-1] in "cm"):
            return ""
    return ""


def find_addresses(hosts: Iterable[Host]) -> tuple[str, ...]:
    """Find this machine's addresses as the other hosts reach it.

    For a host that only ssh can reach (through a jump host, say) this machine's name has to do.
    Raises LaunchError if there is none.
    """
    addresses: dict[str, None] = {}
    for host in hosts:
        if is_local(host):
            continue
        for target in resolve(host.name) or resolve(_ssh_hostname(host)):
            own = _address_towards(target)
            if own:
                addresses[own] = None
    if not addresses:
        addresses.update(dict.fromkeys(resolve(socket.gethostname())))
    own_addresses = tuple(address for address in addresses if not address.startswith("127.") and address != "::1")
    if not own_addresses:
        raise LaunchError(
            f"No address of this machine ({socket.gethostname()}) can be found for the other hosts to answer to. "
            "Give it one in /etc/hosts or in DNS."
        )
    return own_addresses


def plan_daemon_variables(hosts: Iterable[Host], wish: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Tell Open MPI's daemons which of this machine's subnets lead to the other hosts, if all of them are in it.

    By themselves they try every address, a container engine's too, which is another machine's on each host.
    wish: see choose_network. environ: what the user has set goes before.
    """
    targets = [address for host in hosts if not is_local(host) for address in resolve(host.name)[:1] or ("",)]
    own = [each for each in parse_interfaces(read_interfaces()) if ":" not in each.subnet]
    wished = [each for each in own if wish and matches(each, wish)]
    subnets = [each.subnet for each in wished] or [
        each.subnet for each in own if all(is_inside(target, each.subnet) for target in targets)
    ]
    names = ("PRTE_MCA_prte_if_include", "OMPI_MCA_oob_tcp_if_include")
    taken = [name for name in environ if re.fullmatch(r"(PRTE|OMPI)_MCA_(prte|oob_tcp)_if_(in|ex)clude", name)]
    return dict.fromkeys(names, ",".join(dict.fromkeys(subnets))) if subnets and not taken else {}


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # only an address of this machine can be bound
        except OSError:
            return False
        return True


def _address_towards(target: str) -> str:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: it only chooses the way out
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _ssh_settings(host: Host) -> Mapping[str, str]:
    try:
        answer = subprocess.run(
            ["ssh", "-G", "--", host.login],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SSH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.partition(" ")[::2] for line in answer.stdout.splitlines())


def _ssh_hostname(host: Host) -> str:
    return _ssh_settings(host).get("hostname", host.name)


def _ssh_knows(host: Host) -> bool:
    settings = _ssh_settings(host)
    if {"proxyjump", "proxycommand"} & settings.keys():
        return True  # the jump host will look the name up
    name = settings.get("hostname", host.name)
    return name != host.name and bool(resolve(name))
