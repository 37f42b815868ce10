"""hvdkit doctor on hosts that are well, and on hosts with faults: it finds those, and nothing else.

Faults that have nothing to do with one another are made together, as each run takes seconds.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster.doctor import found, look
from cluster.host_faults import (
    done,
    edited,
    folders_of,
    hidden,
    limited,
    mounted_over_ssh,
    names_of,
    plant_package,
    slow_network_at,
    ssh_of,
    with_login_variables,
)
from cluster.lab import ROOT, Lab, environment
from cluster.needs import libfaketime, missing_for_faults

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("without_horovod")]

#: Where other arguments are given, the small job is left out by this one.
NO_JOB = "--no-allreduce"


@pytest.mark.timeout(30, func_only=True)
def test_on_healthy_hosts_nothing_is_found_and_a_job_is_timed(lab: Lab) -> None:
    told = look(lab, "-np", "6")
    assert told["findings"] == [] and told["exit_code"] == 0
    assert told["allreduce"]["transport"] == "hierarchical" and len(told["allreduce"]["ranks"]) == 6
    assert {each["problem"] for each in told["reaches"] if each["named"]} == {""}
    assert all(login["failure"] is None for login in told["logins"]) and len(told["logins"]) == 4


def test_hosts_from_a_file_as_a_table(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("node1 slots=1\nnode3 slots=1\n")
    command: list[str | Path] = [sys.executable, "-m", "hvdkit", "doctor", "--hostfile", file, NO_JOB, "-v"]
    answer = lab.run("node2", command, env=environment(COLUMNS="160"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "shared by all: 10.77.0.0/24 (eth0, enp7s0)" in answer.stdout
    assert "Nothing is wrong." in answer.stdout


def test_names_that_lead_elsewhere(lab: Lab) -> None:
    on_2, on_3 = names_of(lab, "node2"), names_of(lab, "node3")
    with (
        edited(on_2, ("10.77.0.13 node3", "192.168.103.10 node3"), ("10.77.0.11 node1\n", "")),
        edited(on_3, ("10.77.0.11 node1", "127.0.1.1 node1"), ("10.77.0.12 node2", "10.77.0.11 node2")),
    ):
        assert found(look(lab)) == [
            ("name-loopback", ["node3"]),
            ("name-other-host", ["node3"]),
            ("name-unknown", ["node2"]),
            ("wrong-subnet", ["node2"]),
        ]


def test_faults_of_single_hosts_and_a_way_that_is_closed(lab: Lab) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no GPU, and one core only: nothing can be pinned")
    plant_package(lab.folder / "own" / "node3" / "planted", "torch", "9.9")  # in its own /tmp
    limits = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_NPROC: 500}
    with (
        limited(lab, "node2", limits, cores=1),
        edited(names_of(lab, "node2"), ("10.77.0.12 node2", "127.0.1.1 node2")),
        done(lab, "node3", "mount -o remount,size=64m /dev/shm", "mount -o remount,size=1g /dev/shm"),
        done(lab, "node2", "ip route add prohibit 10.77.0.13", "ip route del prohibit 10.77.0.13"),
        done(lab, "node3", "ip route add prohibit 10.77.0.12", "ip route del prohibit 10.77.0.12"),
    ):
        told = look(lab, PYTHONPATH=f"/tmp/planted:{environment()['PYTHONPATH']}")
    assert found(told) == [
        ("hostname", ["node2"]),
        ("limit-files", ["node2"]),
        ("limit-processes", ["node2"]),
        ("one-core", ["node2"]),
        ("port-unreachable", ["node2"]),
        ("port-unreachable", ["node3"]),
        ("shm-small", ["node3"]),
        ("versions", ["node3"]),
    ]


def test_a_clock_that_is_ahead_and_an_environment_on_a_network(lab: Lab) -> None:
    if problem := missing_for_faults():
        pytest.skip(problem)
    # Everything that is started on node2 takes the time for a minute later than it is.
    ahead = {"FAKETIME": "+60s", "LD_PRELOAD": libfaketime()}
    with (
        with_login_variables(lab, "node2", ahead),
        mounted_over_ssh(lab, "node3", "node1", sys.prefix),
    ):
        told = look(lab)
    assert found(told) == [("clock-differs", ["node2"]), ("python-on-nfs", ["node3"])], told["hosts"]
    assert any(re.search(r"(59|60)\.\d s ahead", finding["seen"]) for finding in told["findings"])


def test_hosts_where_nothing_can_be_started_are_told_apart(lab: Lab) -> None:
    others = (
        f"Host locked\n    HostName node2\n    HostKeyAlias node2\n    IdentityFile {lab.folder}/none\n"
        f"    IdentitiesOnly yes\n    GlobalKnownHostsFile {lab.folder}/ssh/known_hosts\n"
        f"Host stranger\n    HostName node2\n    GlobalKnownHostsFile {lab.folder}/none\n"
        "Host closed\n    HostName node2\n    Port 23\n"
        "Host nobody\n    HostName 10.77.0.99\n"
        "Host * !locked\n"
    )
    with (
        edited(ssh_of(lab, "node1"), ("Host *\n", others)),
        hidden(lab, "node2", sys.prefix),
        hidden(lab, "node3", ROOT / "hvdkit", *folders_of("hvdkit")),
    ):
        told = look(lab, hosts="node1,node2,node3,locked,stranger,closed,nobody,nod4")
    assert found(told) == [
        ("host-unreachable", ["nobody"]),
        ("hvdkit-missing", ["node3"]),
        ("name-unknown", ["nod4"]),
        ("python-missing", ["node2"]),
        ("ssh-host-key", ["stranger"]),
        ("ssh-login", ["locked"]),
        ("ssh-refused", ["closed"]),
    ]


@pytest.mark.timeout(30, func_only=True)
def test_hosts_that_are_down_or_cut_off_are_found_in_time(lab: Lab) -> None:
    lab.halt("node3")
    lab.cut("node2")
    assert found(look(lab)) == [("host-unreachable", ["node2"]), ("host-unreachable", ["node3"])]


def test_variables_that_are_wrong_on_every_host(lab: Lab) -> None:
    variables = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "docker0",
        "OMPI_MCA_oob_tcp_if_include": "10.99.0.0/16",
        "MASTER_ADDR": "10.99.0.1",
        "RANK": "0",
        "HVDKIT_FUSION_BYTES": "many",
    }
    told = look(lab, **variables)
    assert [name for name, _ in found(told)] == [
        "interface-apart",
        "interface-inside",
        "interface-missing",
        "master-address",
        "rank-exported",
        "settings",
    ]


def test_a_slow_network_and_more_ranks_than_slots(lab: Lab) -> None:
    lab.limit("node2", "10mbit")
    told = look(lab, NO_JOB, "-np", "7")
    assert [name for name, _ in found(told)] == ["slots", "slow-network"]
    assert any("10.78.0.0/24" in finding["seen"] for finding in told["findings"])


def test_a_host_under_two_names_and_one_under_another_name(lab: Lab) -> None:
    with ExitStack() as stack:
        for name in lab.names:
            stack.enter_context(edited(names_of(lab, name), ("10.77.0.13 node3", "10.77.0.13 node3 third")))
            stack.enter_context(edited(ssh_of(lab, name), ("Host *\n", "Host third\n    HostKeyAlias node3\nHost *\n")))
        assert found(look(lab, hosts="node1,node2,10.77.0.12,third")) == [
            ("host-twice", ["node2", "10.77.0.12"]),
            ("hostname-differs", ["third"]),
        ]


def test_two_hosts_of_one_name_and_no_way_back(lab: Lab) -> None:
    with (
        done(lab, "node3", "hostname node2", "hostname node3"),
        edited(ssh_of(lab, "node2"), ("/ssh/id", "/ssh/none")),
    ):
        assert found(look(lab)) == [("hostname-twice", ["node2", "node3"]), ("ssh-between", ["node2"])]


def test_a_job_that_is_slow_and_whose_ranks_share_a_gpu(lab: Lab) -> None:
    # The names lead to the fast network, and MPI is told to take the slow one.
    variables = {"CUDA_VISIBLE_DEVICES": "0", "OMPI_MCA_btl_tcp_if_include": "10.78.0.0/24"}
    with slow_network_at(lab, "500mbit"):
        told = look(lab, "-np", "3", hosts="node1:2,node2:1", **variables)
    assert found(told) == [("allreduce-slow", []), ("gpu-for-two-ranks", ["node1"])]


def test_a_job_that_does_not_run(lab: Lab) -> None:
    with done(lab, "node3", "mount -o remount,size=1m /dev/shm", "mount -o remount,size=1g /dev/shm"):
        told = look(lab, "-np", "6")
    assert found(told) == [("job-fails", []), ("shm-small", ["node3"])]
