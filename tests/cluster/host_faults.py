"""Faults for one host of the lab, each mended when its block ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster import network
from cluster.lab import Lab, wait_until


@contextlib.contextmanager
def edited(path: Path, *changes: tuple[str, str]) -> Iterator[None]:
    """A file of a host's /etc with some texts in place of others; in place, as it is mounted."""
    before = text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def names_of(lab: Lab, host: str) -> Path:
    """A host's /etc/hosts."""
    return lab.folder / "etc" / host / "hosts"


def ssh_of(lab: Lab, host: str) -> Path:
    """What a host's users of ssh have set."""
    return lab.folder / "etc" / host / "ssh" / "ssh_config"


@contextlib.contextmanager
def done(lab: Lab, host: str, do: str, undo: str) -> Iterator[None]:
    """A shell command on a host, and what undoes it."""
    _run(lab, host, do)
    try:
        yield
    finally:
        if host in lab.hosts:  # one that was halted meanwhile has forgotten it
            _run(lab, host, undo)


def hidden(lab: Lab, host: str, *folders: str | Path) -> contextlib.AbstractContextManager[None]:
    """Folders that are empty on one host."""
    mounts = " && ".join(f"mount -t tmpfs tmpfs '{folder}'" for folder in folders)
    return done(lab, host, mounts or ":", "".join(f"umount -l '{folder}'; " for folder in folders) + ":")


@contextlib.contextmanager
def limited(lab: Lab, host: str, limits: Mapping[int, int], *, cores: int = 0) -> Iterator[None]:
    """What is started on a host by ssh has these limits (of RLIMIT_), and may use so many cores; 0: all."""
    daemons = [pid for pid, line in lab.hosts[host].processes().items() if "sshd" in line]
    assert daemons
    allowed = os.sched_getaffinity(daemons[0])
    before = {kind: resource.prlimit(daemons[0], kind) for kind in limits}
    try:
        for pid in daemons:
            for kind, soft in limits.items():
                resource.prlimit(pid, kind, (soft, before[kind][1]))
            if cores:
                os.sched_setaffinity(pid, sorted(allowed)[:cores])
        yield
    finally:
        for pid in daemons:
            os.sched_setaffinity(pid, allowed)
            for kind, pair in before.items():
                resource.prlimit(pid, kind, pair)


@contextlib.contextmanager
def with_login_variables(lab: Lab, host: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of everything that is started on a host by ssh."""

    def reload(true: bool) -> None:
        lab.kill(host, signal.SIGHUP, "sshd -D")
        asked = ["ssh", "-o", "ConnectTimeout=5", host, "env"]
        first = next(iter(variables))
        # Before it has read its file, and while it begins to listen again, it does not answer like that.
        assert wait_until(lambda: (f"\n{first}=" in f"\n{_ask(lab, asked)}") == true and _ask(lab, asked), 10)

    words = " ".join(f'"{name}={value}"' for name, value in variables.items())
    path = lab.folder / "etc" / host / "ssh" / "sshd_config"
    with edited(path, ("UseDNS no\n", f"UseDNS no\nSetEnv {words}\n")):
        reload(True)
        yield
    reload(False)


@contextlib.contextmanager
def mounted_over_ssh(lab: Lab, host: str, server: str, folder: str) -> Iterator[None]:
    """A folder that a host has from another one, over the network."""
    # Its ssh would keep the pipes of this command open; and is not to be looked for in the folder itself.
    _run(
        lab,
        host,
        f"PATH=/usr/bin:/bin sshfs -o ro,kernel_cache,follow_symlinks '{server}:{folder}' '{folder}' >/dev/null 2>&1",
    )
    try:
        yield
    finally:
        _run(lab, host, f"cd / && PATH=/usr/bin:/bin umount '{folder}'")


@contextlib.contextmanager
def slow_network_at(lab: Lab, rate: str) -> Iterator[None]:
    """The slow network at another rate."""

    def change(rate: str) -> None:
        for number, name in enumerate(lab.names, start=1):
            network.limit(lab.switch, f"slow{number}", rate)
            network.limit(lab.hosts[name].pid, f"eno{number}", rate)

    change(rate)
    try:
        yield
    finally:
        change(network.SLOW_RATE)


def plant_package(folder: Path, name: str, version: str) -> None:
    """What pip's records say of a package that is not there: enough for whoever only asks for its version."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")


def plant_program(folder: Path, name: str, body: str) -> None:
    """A shell script that stands in for a program."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def folders_of(package: str) -> list[Path]:
    """What a package is made of in this environment, and pip's records of it; [] if it is not installed."""
    sites = [Path(folder) for folder in sys.path if Path(folder).name == "site-packages"]  # a venv may lie over another
    found = [path for site in sites for path in (site / package, *site.glob(f"{package}-*.dist-info"))]
    return [path for path in found if path.is_dir()]


def _run(lab: Lab, host: str, command: str) -> None:
    answer = lab.run(host, ["sh", "-c", command])
    assert answer.returncode == 0, answer.stderr


def _ask(lab: Lab, command: list[str]) -> str:
    return lab.run("node1", command).stdout
