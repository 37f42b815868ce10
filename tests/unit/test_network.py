"""Which network the ranks of several hosts use, and what each rank is told before it starts."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from refused import refused

from hvdkit.launch.agent.host_info import read_interfaces
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.job import Job, plan_places
from hvdkit.launch.plan.network import (
    HostInterfaces,
    InterfaceAddress,
    choose_network,
    find_shared_subnets,
    parse_interfaces,
    parse_wish,
    plan_network_variables,
)
from hvdkit.launch.plan.registration import (
    Registration,
    check_layout,
    check_registration,
    parse_registration,
    plan_start_orders,
)


def connection(*rows: str, reached: str = "") -> HostInterfaces:
    """Rows like "eth0 10.0.0.1/24", or "eth0 10.0.0.1/24 25000" with its speed."""
    parts = (row.split() for row in rows)
    split = [(name, *address.split("/"), *(speed or ["0"])) for name, address, *speed in parts]
    interfaces = parse_interfaces([[name, address, int(bits), int(speed)] for name, address, bits, speed in split])
    return HostInterfaces(interfaces, reached)


DOCKER = "docker0 172.17.0.1/16"


def chosen(hosts: dict[str, HostInterfaces], *wish: str) -> dict[str, list[str]]:
    found = choose_network(hosts, wish).interfaces
    return {host: [each.name for each in interfaces] for host, interfaces in found.items()}


def test_the_subnet_that_all_hosts_share_is_taken_whatever_its_interfaces_are_called() -> None:
    hosts = {
        "a": connection(DOCKER, "eth1 192.168.1.9/24", "eth0 10.0.0.1/24"),
        "b": connection(DOCKER, "eth1 192.168.2.9/24", "ens5 10.0.0.2/24"),
        "c": connection(DOCKER, "eth1 192.168.3.9/24", "enp7s0 10.0.0.3/24"),
    }
    assert chosen(hosts) == {"a": ["eth0"], "b": ["ens5"], "c": ["enp7s0"]}
    assert choose_network(hosts).why == "ranks on different hosts communicate over 10.0.0.0/24 (eth0, ens5, enp7s0)"


def test_a_subnet_with_the_same_address_on_two_hosts_is_inside_each_of_them() -> None:
    hosts = {"a": connection("vm7 10.5.0.1/24"), "b": connection("vm7 10.5.0.1/24")}
    assert find_shared_subnets(hosts) == ()


def test_networks_inside_a_host_are_known_by_their_names_and_link_local_ones_by_their_addresses() -> None:
    for name, address in (("docker0", "172.17.0."), ("br-0123456789ab", "172.18.0."), ("eth0", "169.254.1.")):
        hosts = {"a": connection(f"{name} {address}1/16"), "b": connection(f"{name} {address}2/16")}
        assert find_shared_subnets(hosts) == ()
    # a bridge may well be the way out, on a host of virtual machines
    assert find_shared_subnets({"a": connection("br0 10.0.0.1/24"), "b": connection("br0 10.0.0.2/24")})


def test_of_several_shared_subnets_the_fastest_counts_then_the_one_of_the_names() -> None:
    hosts = {
        "a": connection("eth0 10.0.0.1/24 1000", "ib0 10.1.0.1/24 100000", reached="10.0.0.1"),
        "b": connection("eth0 10.0.0.2/24 1000", "ib0 10.1.0.2/24 100000", reached="10.0.0.2"),
    }
    assert chosen(hosts) == {"a": ["ib0"], "b": ["ib0"]}
    hosts = {
        "a": connection("eth0 10.0.0.1/24", "eth1 10.1.0.1/24", reached="10.1.0.1"),
        "b": connection("eth0 10.0.0.2/24", "eth1 10.1.0.2/24", reached="10.1.0.2"),
    }
    assert chosen(hosts) == {"a": ["eth1"], "b": ["eth1"]}


def test_hosts_without_a_common_subnet_use_what_they_have_reached_hvdrun_by() -> None:
    hosts = {
        "a": connection(DOCKER, "eth0 10.0.1.1/24", reached="10.0.1.1"),
        "b": connection(DOCKER, "eth0 10.0.2.1/24", "eth1 10.9.0.1/24", reached="10.0.2.1"),
    }
    assert chosen(hosts) == {"a": ["eth0"], "b": ["eth0"]}
    assert "share no subnet" in choose_network(hosts).why


def test_a_wish_is_a_name_or_a_subnet_and_what_a_host_lacks_is_refused_with_what_it_has() -> None:
    hosts = {
        "a": connection("eth0 10.0.0.1/24", "eno1 10.1.0.1/24"),
        "b": connection("eth0 10.0.0.2/24", "eno2 10.1.0.2/24"),
    }
    assert chosen(hosts, "10.1.0.0/16") == {"a": ["eno1"], "b": ["eno2"]}
    assert chosen(hosts, "eno1", "eno2") == {"a": ["eno1"], "b": ["eno2"]}
    with refused("network-missing", names=["--network-interfaces eno1", "b has eth0 10.0.0.2/24, eno2 10.1.0.2/24"]):
        choose_network(hosts, ["eno1"])


@pytest.mark.parametrize("text", ["", "eth0,", "10.0.0.0/33", "eth0 eth1", "a=b", "10.0.0.1;x"])
def test_what_is_neither_a_name_nor_a_subnet_is_refused(text: str) -> None:
    with refused("network-invalid", names=[f"--network-interfaces {text!r}: "]):
        parse_wish(text)


def test_libraries_are_told_and_what_the_user_has_said_stays() -> None:
    interfaces = [InterfaceAddress("ens5", "10.0.0.2", "10.0.0.0/24")]
    assert plan_network_variables(interfaces, {}) == {
        "GLOO_SOCKET_IFNAME": "ens5",
        "NCCL_SOCKET_IFNAME": "=ens5",
        "FI_TCP_IFACE": "ens5",
        "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24",
    }
    mine = {"OMPI_MCA_btl_tcp_if_exclude": "lo", "GLOO_SOCKET_IFNAME": "eth1"}
    assert set(plan_network_variables(interfaces, mine)) == {"NCCL_SOCKET_IFNAME", "FI_TCP_IFACE"}


JOB = Job(command=(), ranks=3)


def arrival(rank: int, size: int, host: str, *, fabric: bool = False) -> Registration:
    number = ord(host[-1]) - ord("a") + 1
    here = connection(f"eth{number} 10.0.0.{number}/24", reached=f"10.0.0.{number}")
    return Registration(rank, size, host, here, fabric)


def test_each_rank_is_told_of_its_hosts_ranks_and_interface() -> None:
    arrivals = {rank: arrival(rank, 3, host) for rank, host in enumerate("aab")}
    told = plan_start_orders(arrivals, JOB, (24, 80, True)).by_rank
    assert [told[rank]["local_size"] for rank in range(3)] == [2, 2, 1]
    assert [told[rank]["window"] for rank in range(3)] == [(24, 80, True), None, None]
    assert [told[rank]["variables"]["GLOO_SOCKET_IFNAME"] for rank in range(3)] == ["eth1", "eth1", "eth2"]
    assert told[0]["variables"]["OMPI_MCA_pml"] == "ob1"  # nothing but TCP is there
    with_fabric = {rank: arrival(rank, 3, host, fabric=host == "b") for rank, host in enumerate("aab")}
    assert "OMPI_MCA_pml" not in plan_start_orders(with_fabric, JOB).by_rank[0]["variables"]


def test_scripts_meet_at_rank_0s_address_on_the_network_that_was_chosen() -> None:
    arrivals = {rank: arrival(rank, 3, host) for rank, host in enumerate("baa")}
    arrivals[0] = replace(arrivals[0], ports=(20001, 20002))
    told = plan_start_orders(arrivals, JOB, name="77").by_rank
    assert {told[rank]["variables"]["MASTER_ADDR"] for rank in range(3)} == {"10.0.0.2"}
    assert [told[rank]["variables"]["LOCAL_RANK"] for rank in range(3)] == ["0", "0", "1"]
    arrivals[3] = replace(arrival(3, 3, "b"), joins=True)
    del arrivals[0]  # lost; the variables describe the first world only
    joining = plan_start_orders(arrivals, JOB, name="77").by_rank[3]["variables"]
    assert "RANK" not in joining and (joining["HOROVOD_RANK"], joining["HOROVOD_SIZE"]) == ("2", "3")


def test_on_one_host_there_is_nothing_to_choose() -> None:
    job = Job(command=(), ranks=2, networks=("no such",))
    orders = plan_start_orders({rank: arrival(rank, 2, "a") for rank in range(2)}, job)
    assert orders.by_rank[1] == {
        "window": None,
        "local_size": 2,
        "one_host": True,
        "variables": {},
        "cores": {"sharers": 2},
    }


def test_ranks_that_are_alone_or_twice_there_are_turned_away() -> None:
    assert check_registration(arrival(1, 4, "a"), 4, {0: "a"}) == ""
    assert check_registration(arrival(1, 0, "a"), 4, {0: "a"}) == ""  # PMIx by itself does not tell
    assert "started as one of 1 ranks, but 4 were requested" in check_registration(arrival(0, 1, "a"), 4, {})
    assert "started twice, on a and on b" in check_registration(arrival(0, 4, "b"), 4, {0: "a"})
    assert "4 ranks were requested" in check_registration(arrival(4, 0, "a"), 4, {})


def test_ranks_that_are_piled_on_one_host_are_noticed_by_number_not_by_name() -> None:
    planned = plan_places(4, (Host("a.site.org", 2), Host("b.site.org", 8)))
    assert planned == (("a.site.org", 2), ("b.site.org", 2))
    assert check_layout(planned, {0: "a", 1: "a", 2: "b", 3: "b"}) == ""
    assert "4 on a instead of 2 on a.site.org, 2 on b.site.org" in check_layout(planned, dict.fromkeys(range(4), "a"))
    assert check_layout((), dict.fromkeys(range(4), "a")) == ""


def test_what_no_agent_says_is_refused() -> None:
    for hello in (
        {},
        {"rank": "x", "size": 1, "host": "a"},
        {"rank": 0, "size": 1, "host": "a", "interfaces": [[1, 2, 3, 4]]},
    ):
        with pytest.raises((ValueError, KeyError)):
            parse_registration(hello)


def test_this_machines_addresses_are_read_without_its_loopback() -> None:
    found = parse_interfaces(read_interfaces())
    assert not any(each.address in ("127.0.0.1", "::1") for each in found)
    for each in found:
        with socket.socket(socket.AF_INET6 if ":" in each.address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if ":" not in each.address:
                probe.bind((each.address, 0))
