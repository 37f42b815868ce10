"""Cables and addresses: namespaces of the kernel's network, and `ip` and `tc` run in them.

Each host has four interfaces. Only the first has the same subnet on all hosts and is fast; its name differs. The others
are traps for a choice by name, by order or by subnet alone.

    wire   10.77.0.0/24      eth0, ens5, enp7s0   what the hosts' names resolve to
    slow   10.78.0.0/24      eno1, eno2, eno3     100 Mbit/s, shared too
    stray  192.168.10N.0/24  eth1 everywhere      another subnet on each host; leads nowhere
    docker 172.17.0.1/16     docker0 everywhere   a bridge inside the host, with the same address on all of them
"""

from __future__ import annotations

import subprocess

WIRE, SLOW = "10.77.0", "10.78.0"
WIRE_NAMES = ("eth0", "ens5", "enp7s0")
SLOW_RATE = "100mbit"


def run_in(pid: int, *command: str, lines: str | None = None) -> str:
    """Run a command in a process's network; returns what it printed, raises RuntimeError if it fails."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
        input=lines,
        stdin=subprocess.DEVNULL if lines is None else None,
        capture_output=True,
        text=True,
        timeout=20,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{lines or ''}")
    return done.stdout


def wire_interface(number: int) -> str:
    """The name of host `number`'s (from 1) interface to the wire."""
    return WIRE_NAMES[(number - 1) % len(WIRE_NAMES)]


def wire_address(number: int) -> str:
    """The address that host `number`'s name resolves to."""
    return f"{WIRE}.{10 + number}"


def slow_address(number: int) -> str:
    """Host `number`'s address on the slow network."""
    return f"{SLOW}.{10 + number}"


def build_switches(switch: int) -> None:
    """Make the two bridges. switch: a process whose network has nothing yet."""
    bridges = (
        f"link add {name} type bridge forward_delay 0 stp_state 0\nlink set {name} up" for name in ("br0", "br1")
    )
    run_in(switch, "ip", "-batch", "-", lines="link set lo up\n" + "\n".join(bridges))


def plug_in(switch: int, host: int, number: int) -> None:
    """Give a host its interfaces. host: a process in its network; number: from 1."""
    wire = wire_interface(number)
    cables = ((f"wire{number}", wire, "br0"), (f"slow{number}", f"eno{number}", "br1"), (f"stray{number}", "eth1", ""))
    lines = []
    for here, there, bridge in cables:
        lines.append(f"link add {here} type veth peer name {there} netns {host}")
        lines.append(f"link set {here} {f'master {bridge}' if bridge else ''} up")
    run_in(switch, "ip", "-batch", "-", lines="\n".join(lines))
    lines = [
        "link set lo up",
        # always the same, or the others could not reach a host that was started again until they forget the old one
        f"link set {wire} address 02:6c:61:62:00:{number:02x}",
        f"link set eno{number} address 02:6c:61:62:01:{number:02x}",
        f"addr add {wire_address(number)}/24 dev {wire}",
        f"addr add {slow_address(number)}/24 dev eno{number}",
        f"addr add 192.168.{100 + number}.10/24 dev eth1",
        "link add docker0 type bridge",
        "link add inside type veth peer name container",
        "link set inside master docker0",
        "addr add 172.17.0.1/16 dev docker0",
        *(f"link set {name} up" for name in (wire, f"eno{number}", "eth1", "inside", "container", "docker0")),
    ]
    run_in(host, "ip", "-batch", "-", lines="\n".join(lines))
    limit(switch, f"slow{number}", SLOW_RATE)
    limit(host, f"eno{number}", SLOW_RATE)


def unplug(switch: int, number: int) -> None:
    """Take away a host's cables; raises RuntimeError if they are gone."""
    for name in ("wire", "slow", "stray"):
        run_in(switch, "ip", "link", "del", f"{name}{number}")


def limit(pid: int, interface: str, rate: str) -> None:
    """Limit what leaves through an interface; "" for no limit. Nothing is dropped: TCP slows down."""
    if rate:
        bucket = ["rate", rate, "burst", "256k", "latency", "50ms"]
        run_in(pid, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)
    elif "tbf" in run_in(pid, "tc", "qdisc", "show", "dev", interface):
        run_in(pid, "tc", "qdisc", "del", "dev", interface, "root")
