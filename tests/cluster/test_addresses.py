"""Which way the ranks' bytes go, seen in the counters of the hosts' interfaces."""

from __future__ import annotations

import pytest
from cluster.jobs import EVERYWHERE, HVDRUN, MEET
from cluster.lab import Lab
from cluster.network import wire_interface

pytestmark = pytest.mark.cluster

MIB = 1 << 20


def sent(lab: Lab) -> dict[str, list[int]]:
    """Bytes that each host has sent over its wire, its slow interface, its stray one and its bridge."""
    found = {}
    for number, name in enumerate(lab.names, start=1):
        interfaces = (wire_interface(number), f"eno{number}", "eth1", "docker0")
        files = [f"/sys/class/net/{each}/statistics/tx_bytes" for each in interfaces]
        found[name] = [int(word) for word in lab.run(name, ["cat", *files]).stdout.split()]
    return found


def send(lab: Lab, *options: str) -> dict[str, list[int]]:
    """Add up 4 MiB on all hosts; returns what each has sent over which interface."""
    before = sent(lab)
    command = [*HVDRUN, *options, "-np", "3", "-H", EVERYWHERE, HVDRUN[0], MEET, str(MIB)]
    done = lab.run("node1", command, timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    after = sent(lab)
    return {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in lab.names}


def test_ranks_use_the_subnet_that_all_hosts_share(lab: Lab) -> None:
    for name, (wire, *others) in send(lab).items():
        assert wire > 3 * MIB and max(others) < MIB // 10, name


@pytest.mark.parametrize("wish", ["10.78.0.0/24", "eno1,eno2,eno3"])
def test_ranks_use_the_interfaces_that_are_asked_for(lab: Lab, wish: str) -> None:
    for name, (wire, slow, *others) in send(lab, "--network-interfaces", wish).items():
        assert slow > 3 * MIB and wire < MIB // 2 and max(others) < MIB // 10, name


def test_an_interface_that_a_host_lacks_is_refused_with_what_it_has(lab: Lab) -> None:
    command = [*HVDRUN, "--network-interfaces", "eth0", "-np", "3", "-H", EVERYWHERE, "hostname"]
    done = lab.run("node1", command)
    assert done.returncode == 2
    assert "node2 has ens5 10.77.0.12/24, eno2 10.78.0.12/24, eth1 192.168.102.10/24" in done.stderr
    assert done.stdout == ""


def test_other_libraries_are_told_each_hosts_own_name_for_it(lab: Lab) -> None:
    words = "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $OMPI_MCA_btl_tcp_if_include"
    done = lab.run("node1", [*HVDRUN, "-np", "3", "-H", EVERYWHERE, "sh", "-c", words])
    assert sorted(done.stdout.splitlines()) == [
        "[0 node1] eth0 =eth0 10.77.0.0/24",
        "[1 node2] ens5 =ens5 10.77.0.0/24",
        "[2 node3] enp7s0 =enp7s0 10.77.0.0/24",
    ]


def test_addresses_of_ipv6_beside_those_of_ipv4_change_nothing(lab: Lab) -> None:
    """Open MPI's daemons ignore a subnet, with a warning, on an interface that has an address of IPv6 too."""
    wires = {name: wire_interface(number) for number, name in enumerate(lab.names, start=1)}
    for number, (name, wire) in enumerate(wires.items(), start=1):
        lab.run(name, ["ip", "address", "add", f"fd00:77::{number}/64", "dev", wire, "nodad"])
    try:
        done = lab.run("node1", [*HVDRUN, "-np", "3", "-H", EVERYWHERE, HVDRUN[0], MEET, "1024"], timeout=40)
    finally:
        for number, (name, wire) in enumerate(wires.items(), start=1):
            lab.run(name, ["ip", "address", "delete", f"fd00:77::{number}/64", "dev", wire])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
