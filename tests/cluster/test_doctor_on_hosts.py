"""hvdkit doctor on hosts that are well, and on hosts with a fault: it finds that, and nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from cluster.faults import done, edited, names_of, pinned
from cluster.lab import Lab, environment
from cluster.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

DOCTOR = [sys.executable, "-m", "hvdkit", "doctor", "--json"]
HOSTS = "node1:2,node2:2,node3:2"


def doctor(lab: Lab, *arguments: str, hosts: str = HOSTS, **variables: str) -> dict[str, Any]:
    """What it says on node1; without the small job unless that is asked for."""
    options = arguments or ("--no-allreduce",)
    answer = lab.run("node1", [*DOCTOR, "-H", hosts, *options], env=environment(**variables))
    assert answer.stdout, answer.stderr
    told: dict[str, Any] = json.loads(answer.stdout)
    assert answer.returncode == told["exit_code"]
    assert "Traceback" not in answer.stderr
    return told


def names(told: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(finding["name"], finding["hosts"]) for finding in told["findings"]]


def test_on_healthy_hosts_nothing_is_found_and_a_job_is_timed(lab: Lab) -> None:
    began = time.monotonic()
    told = doctor(lab, "-np", "6")
    assert time.monotonic() - began < 30
    assert told["findings"] == [] and told["exit_code"] == 0
    assert told["allreduce"]["transport"] == "hierarchical" and len(told["allreduce"]["ranks"]) == 6
    assert {each["problem"] for each in told["reaches"] if each["named"]} == {""}
    assert all(login["failure"] is None for login in told["logins"]) and len(told["logins"]) == 4


def test_hosts_from_a_file_as_a_table(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("node1 slots=1\nnode3 slots=1\n")
    command: list[str | Path] = [sys.executable, "-m", "hvdkit", "doctor", "--hostfile", file, "--no-allreduce"]
    answer = lab.run("node2", command, env=environment(COLUMNS="160"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "shared by all: 10.77.0.0/24 (eth0, enp7s0)" in answer.stdout
    assert "Nothing is wrong." in answer.stdout


def fault(lab: Lab, name: str) -> AbstractContextManager[None]:
    hosts, ssh = names_of(lab, "node2"), lab.folder / "etc" / "node1" / "ssh" / "ssh_config"
    faults: dict[str, AbstractContextManager[None]] = {
        "wrong subnet": edited(hosts, "10.77.0.13 node3", "192.168.103.10 node3"),
        "unknown name": edited(hosts, "10.77.0.13 node3", ""),
        "loopback": edited(hosts, "10.77.0.13 node3", "127.0.1.1 node3"),
        "other host": edited(hosts, "10.77.0.13 node3", "10.77.0.11 node3"),
        "own name": edited(hosts, "10.77.0.12 node2", "127.0.1.1 node2"),
        "firewall": done(lab, "node2", "ip route add prohibit 10.77.0.13", "ip route del prohibit 10.77.0.13"),
        "one core": pinned(lab, "node2"),
        "ssh key": edited(ssh, "/ssh/id", "/ssh/none"),
        "host key": edited(ssh, "known_hosts", "known_none"),
        "hostname": done(lab, "node3", "hostname node2", "hostname node3"),
        "small memory": done(lab, "node2", "mount -o remount,size=64m /dev/shm", "mount -o remount,size=1g /dev/shm"),
        "no python": done(lab, "node2", f"mount -t tmpfs tmpfs {sys.prefix}", f"umount {sys.prefix}"),
        "version": done(
            lab,
            "node2",
            "mkdir -p /tmp/own/torch-9.9.dist-info && echo 'Name: torch\nVersion: 9.9' "
            ">/tmp/own/torch-9.9.dist-info/METADATA",
            "rm -r /tmp/own",
        ),
    }
    return faults[name]


@pytest.mark.parametrize(
    ("name", "finding", "where"),
    [
        ("wrong subnet", "wrong-subnet", ["node2"]),
        ("unknown name", "name-unknown", ["node2"]),
        ("loopback", "name-loopback", ["node2"]),
        ("other host", "name-other-host", ["node2"]),
        ("own name", "hostname", ["node2"]),
        ("one core", "one-core", ["node2"]),
        ("hostname", "hostname-twice", ["node2", "node3"]),
        ("small memory", "shm-small", ["node2"]),
        ("no python", "python-missing", ["node2"]),
        ("version", "versions", ["node2"]),
    ],
)
def test_a_fault_of_one_host_is_found_alone(lab: Lab, name: str, finding: str, where: list[str]) -> None:
    if name == "one core" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no GPU, and one core only: nothing can be pinned")
    path = environment()["PYTHONPATH"]
    with fault(lab, name):
        told = doctor(lab, PYTHONPATH=f"/tmp/own:{path}" if name == "version" else path)
    # Where Horovod is installed here, it was built for a torch that node2 then has not.
    follows = ("horovod-built-for-other", ["node2"]) if name == "version" else None
    assert [one for one in names(told) if one != follows] == [(finding, where)]


def test_a_way_that_is_closed_is_found_from_both_ends(lab: Lab) -> None:
    with fault(lab, "firewall"):  # answers to the other end are lost too
        assert sorted(names(doctor(lab))) == [("port-unreachable", ["node2"]), ("port-unreachable", ["node3"])]


@pytest.mark.parametrize(("name", "finding"), [("ssh key", "ssh-login"), ("host key", "ssh-host-key")])
def test_ssh_that_would_ask_is_found_for_each_host(lab: Lab, name: str, finding: str) -> None:
    with fault(lab, name):
        assert names(doctor(lab)) == [(finding, ["node2"]), (finding, ["node3"])]


def test_hosts_that_are_down_or_cut_off_are_found_in_time(lab: Lab) -> None:
    began = time.monotonic()
    lab.halt("node3")
    try:
        assert names(doctor(lab)) == [("host-unreachable", ["node3"])]
    finally:
        lab.boot("node3")
    lab.cut("node2")
    assert names(doctor(lab, hosts="node1,node2")) == [("host-unreachable", ["node2"])]
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("variables", "finding"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "interface-apart"),
        ({"GLOO_SOCKET_IFNAME": "docker0"}, "interface-inside"),
        ({"OMPI_MCA_btl_tcp_if_include": "10.99.0.0/16"}, "interface-missing"),
        ({"MASTER_ADDR": "10.99.0.1"}, "master-address"),
        ({"MASTER_PORT": "22"}, "master-port"),
        ({"RANK": "0"}, "rank-exported"),
        ({"HVDKIT_FUSION_BYTES": "many"}, "settings"),
    ],
)
def test_a_variable_that_is_wrong_is_found_alone(lab: Lab, variables: dict[str, str], finding: str) -> None:
    told = doctor(lab, **variables)
    assert {name for name, _ in names(told)} == {finding}


def test_a_network_that_is_slower_than_another_is_found(lab: Lab) -> None:
    lab.limit("node2", "10mbit")
    told = doctor(lab)
    assert [name for name, _ in names(told)] == ["slow-network"]
    assert "10.78.0.0/24" in told["findings"][0]["seen"]


def test_a_host_under_two_names_and_ranks_without_slots(lab: Lab) -> None:
    assert names(doctor(lab, hosts="node1,node2,10.77.0.12")) == [("host-twice", ["node2", "10.77.0.12"])]
    assert [name for name, _ in names(doctor(lab, "--no-allreduce", "-np", "7"))] == ["slots"]


def test_in_an_allocation_of_slurm_hosts_are_found_and_reached_by_srun(slurm: Slurm, tmp_path: Path) -> None:
    body = f"{' '.join(DOCTOR)} >doctor.json"
    code, output = slurm.batch(tmp_path, body, "--nodes=3", "--ntasks-per-node=2", "--exclusive")
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert (code, told["via"]) == (told["exit_code"], "srun"), output
    assert [(host["name"], host["slots"]) for host in told["hosts"]] == [("node1", 2), ("node2", 2), ("node3", 2)]
    assert len(told["allreduce"]["ranks"]) == 6
    # Here srun speaks no PMI unless it is told to.
    assert [name for name, _ in names(told)] == ["srun-singletons"]
    assert "--mpi=pmix" in told["findings"][0]["cure"]


def test_mistakes_of_a_batch_script_are_found(slurm: Slurm, tmp_path: Path) -> None:
    body = f"export RANK=0 SLURM_NTASKS_PER_NODE=2\n{' '.join(DOCTOR)} --here >doctor.json"
    slurm.batch(tmp_path, body, "--nodes=2", "--ntasks=3", "--cpus-per-task=2")
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert {name for name, _ in names(told)} == {"rank-exported", "slurm-tasks", "cpus-per-task", "srun-singletons"}
