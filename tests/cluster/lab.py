"""Hosts made of namespaces on this machine: each with its own name, network, processes, /tmp, /dev/shm and sshd.

Everything else is shared, as on a cluster with a shared home. The hosts are child processes that the kernel ends with
this one, so nothing is left behind, however the tests end; the machine's own network, /etc and ~/.ssh are not touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster import network
from cluster.sshd import write_ssh

from hvdkit.launch.agent.session_reaper import die_with_parent

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_UP_S = 10.0
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")


def wait_until(true: Callable[[], object], seconds: float) -> bool:
    """Wait for something to become true; False if it does not."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def environment(**variables: str) -> dict[str, str]:
    """What a command on a host gets: this Python first on PATH, this checkout first to be imported, and `variables`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return {**kept, "PATH": f"{sys.prefix}/bin:{system}", "PYTHONPATH": path, **variables}


@dataclass
class Host:
    """One host. process: unshare's, whose death ends the host."""

    name: str
    number: int
    process: subprocess.Popen[bytes]
    network: int = -1
    settled: set[int] = field(default_factory=set)

    @property
    def pid(self) -> int:
        """Its first process, as this machine numbers it."""
        outer = self.process.pid
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def processes(self) -> dict[int, str]:
        """All its processes: this machine's numbers, and their command lines. Those that have ended do not count."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if os.readlink(folder / "ns/pid") == mine:
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if state not in "ZX":
                        found[int(folder.name)] = f"{words.strip()} [{state}]"
        return found


class Lab:
    """Hosts node1, node2, ... on one wire.

    folder: for keys and each host's /tmp; all hosts see it. shared: what else below /tmp all of them see.
    """

    def __init__(self, folder: Path, *, count: int = 3, shared: Iterable[Path] = ()) -> None:
        self.folder = folder
        self.names = tuple(f"node{number}" for number in range(1, count + 1))
        needed = {folder, Path(sys.prefix), ROOT, *shared}
        self.shared = sorted(path for path in needed if path.resolve().is_relative_to("/tmp"))
        self.hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._cables: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        """Start the hosts; they answer to ssh when it returns."""
        write_ssh(self.folder, self.names)
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent(os.getpid())
        )
        self._await(lambda: _own_network(self.switch), "the switch has no network of its own")
        network.build_switches(self.switch)
        for name in self.names:
            self._start(name)
        for name in self.names:
            self._await_ssh(name)

    def close(self) -> None:
        """End every host, with all that runs on it."""
        for host in list(self.hosts):
            self.halt(host)
        for cable in self._cables:
            cable.kill()
            cable.communicate()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()

    @property
    def switch(self) -> int:
        """The process that holds the network between the hosts."""
        assert self._switch is not None
        return self._switch.pid

    def start(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host; signals sent to the Popen reach it. env: instead of environment()."""
        enter = [sys.executable, "-I", "-S", str(HERE / "enter.py"), str(self.hosts[host].pid)]
        return subprocess.Popen(
            [*enter, *map(str, command)],
            env=environment() if env is None else env,
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent(os.getpid()),
        )

    def run(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        with self.start(host, command, env=env, cwd=cwd) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{host}: {command} took more than {timeout} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)

    # what can go wrong with hosts and cables

    def halt(self, host: str) -> None:
        """Kill all processes of a host at once; its peers see their connections close."""
        gone = self.hosts.pop(host)
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(gone.pid, signal.SIGKILL)
        gone.process.kill()
        gone.process.wait()
        os.close(gone.network)

    def boot(self, host: str) -> None:
        """Start a halted host again."""
        self._start(host)
        self._await_ssh(host)

    def cut(self, host: str) -> None:
        """Cut a host off: nothing arrives any more, and nobody is told."""
        for cable in ("wire", "slow"):
            network.run_in(self.switch, "ip", "link", "set", f"{cable}{self._number(host)}", "nomaster")

    def mend(self, host: str) -> None:
        """Undo `cut`."""
        for cable, bridge in (("wire", "br0"), ("slow", "br1")):
            network.run_in(self.switch, "ip", "link", "set", f"{cable}{self._number(host)}", "master", bridge)

    def limit(self, host: str, rate: str) -> None:
        """Limit a host's wire in both directions, like "200mbit"; "" for no limit."""
        network.limit(self.switch, f"wire{self._number(host)}", rate)
        network.limit(self.hosts[host].pid, network.wire_interface(self._number(host)), rate)

    def delay(self, host: str, milliseconds: float) -> None:
        """Make a host's wire so long that each frame, in either direction, comes so much later; once a host."""
        wire = f"wire{self._number(host)}"
        network.run_in(self.switch, "ip", "link", "set", wire, "nomaster")
        script = [sys.executable, "-I", "-S", str(HERE / "long_cable.py"), wire, "br0", str(milliseconds)]
        cable = subprocess.Popen(
            ["nsenter", f"--net=/proc/{self.switch}/ns/net", *script],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._cables.append(cable)
        assert cable.stdout is not None
        if cable.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no long cable for {host}; is there a /dev/net/tun?")

    def kill(self, host: str, number: signal.Signals, words: str) -> list[int]:
        """Send a signal to the processes of a host whose command line contains `words`; returns them."""
        chosen = [pid for pid, line in self.hosts[host].processes().items() if words in line]
        for pid in chosen:
            os.kill(pid, number)
        return chosen

    # what is left

    def settle(self) -> None:
        """Take what runs now for what is meant to run (Slurm's daemons, say)."""
        for host in self.hosts.values():
            host.settled = set(host.processes())

    def strays(self) -> dict[str, list[str]]:
        """By host, the command lines of what has been started since, and has not ended.

        What sshd does for a connection that was cut is its own matter: it goes on waiting for the other side.
        """
        left = {
            name: [
                line
                for pid, line in host.processes().items()
                if pid not in host.settled and not line.startswith("sshd: ")
            ]
            for name, host in self.hosts.items()
        }
        return {name: lines for name, lines in left.items() if lines}

    def restore(self) -> dict[str, list[str]]:
        """Make all hosts whole again; returns the strays that had to be ended."""
        for name in self.names:
            if name not in self.hosts:
                self.boot(name)
            self.mend(name)
            self.limit(name, "")
        left = self.strays() if not wait_until(lambda: not self.strays(), 2) else {}
        for host in self.hosts.values():
            for pid in set(host.processes()) - host.settled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            memory = Path("/proc", str(host.pid), "root", "dev", "shm")  # the host's own, seen from here
            for path in memory.iterdir():  # those that were killed could not clear up
                with contextlib.suppress(OSError):
                    path.unlink()
        return left

    def _number(self, host: str) -> int:
        return self.names.index(host) + 1

    def _start(self, name: str) -> None:
        number = self._number(name)
        own = self.folder / "own" / name
        own.mkdir(parents=True, exist_ok=True)
        log = (self.folder / f"{name}.log").open("wb")
        words = ["unshare", *_NAMESPACES, "/bin/bash", str(HERE / "host_init.sh"), name]
        process = subprocess.Popen(
            [*words, str(self.folder / "etc" / name), str(own), *map(str, self.shared)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        log.close()
        self._await(lambda: _own_network(process.pid), f"{name} has no network of its own")
        with contextlib.suppress(RuntimeError):  # its other end, where the kernel has not yet cleared up after a halt
            network.unplug(self.switch, number)
        network.plug_in(self.switch, process.pid, number)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        self.hosts[name] = Host(name, number, process, os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY))

    def _await_ssh(self, name: str) -> None:
        probe = f"exec 3<>/dev/tcp/{network.wire_address(self._number(name))}/22"
        command = ["nsenter", f"--net=/proc/{self.hosts[name].process.pid}/ns/net", "bash", "-c", probe]
        answers = lambda: subprocess.run(command, stderr=subprocess.DEVNULL, timeout=20).returncode == 0  # noqa: E731
        self._await(answers, f"{name} does not answer to ssh")
        self.hosts[name].settled = set(self.hosts[name].processes())

    def _await(self, true: Callable[[], object], problem: str) -> None:
        if not wait_until(true, _UP_S):
            logs = "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))
            raise RuntimeError(f"{problem} after {_UP_S:g} s:\n{logs}")


def _own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
