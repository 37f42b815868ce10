"""hvdkit doctor on several hosts: what it concludes from what they saw of one another."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
from doctor_facts import GPUS
from doctor_survey import HEALTHY_SURVEY, NAMES, host_facts, with_environ, with_facts
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hvdkit.tools.doctor.evaluate import evaluate
from hvdkit.tools.doctor.facts import HostFacts, decode
from hvdkit.tools.doctor.findings import JobRequest
from hvdkit.tools.doctor.hosts.agent import measure_bandwidth, start_responder, try_connection
from hvdkit.tools.doctor.hosts.session import (
    agent_command,
    explain,
    srun_argv,
    ssh_argv,
    with_own_folder,
)
from hvdkit.tools.doctor.hosts.surveyor import expect_seconds, list_peers
from hvdkit.tools.doctor.report import build_survey_document, print_survey_tables, print_verdict
from hvdkit.tools.doctor.survey import (
    Allreduce,
    ConnectionAttempt,
    Failure,
    Login,
    Lookup,
    Rank,
    Survey,
    find_common_subnets,
)

JOB = JobRequest(hosts=3, slots=6)


def without(survey: Survey, name: str, failure: Failure) -> Survey:
    """A host whose agent did not come."""
    hosts = tuple(replace(host, facts=None, failure=failure) if host.name == name else host for host in survey.hosts)
    return replace(
        survey,
        hosts=hosts,
        lookups=tuple(each for each in survey.lookups if each.source != name),
        reaches=tuple(each for each in survey.reaches if name not in (each.source, each.target)),
        logins=tuple(each for each in survey.logins if each.source != name),
        allreduce=None,
    )


def with_nccl(version: str, slots: tuple[int, ...]) -> Survey:
    """Hosts with a GPU for each of their slots."""
    survey = HEALTHY_SURVEY
    for number, (name, count) in enumerate(zip(NAMES, slots, strict=True), start=1):
        facts = host_facts(number)
        found = replace(facts.accelerators, nccl=version, gpus=GPUS[:count])
        survey = with_facts(survey, name, replace(facts, accelerators=found))
    hosts = tuple(replace(host, slots=count) for host, count in zip(survey.hosts, slots, strict=True))
    return replace(survey, hosts=hosts)


def looked_up(source: str, name: str, *addresses: str) -> Survey:
    """A name that leads elsewhere on a host, and so does what is tried by it."""
    lookups = [
        Lookup(source, name, addresses) if (each.source, each.name) == (source, name) else each
        for each in HEALTHY_SURVEY.lookups
    ]
    reaches = [
        each for each in HEALTHY_SURVEY.reaches if (each.source, each.target, each.named) != (source, name, True)
    ]
    by_address = {each.address: each for each in HEALTHY_SURVEY.reaches if (each.source, each.target) == (source, name)}
    for address in addresses:
        known = by_address.get(address, ConnectionAttempt(source, name, address, True, "refused"))
        reaches.append(replace(known, named=True))
    return replace(HEALTHY_SURVEY, lookups=tuple(lookups), reaches=tuple(reaches))


def blocked(source: str, target: str) -> Survey:
    """A firewall."""
    reaches = tuple(
        replace(each, problem="timeout", mbit=0.0) if (each.source, each.target) == (source, target) else each
        for each in HEALTHY_SURVEY.reaches
    )
    return replace(HEALTHY_SURVEY, reaches=reaches)


def slow_names() -> Survey:
    """Names that lead to the slow network."""
    reaches = [each for each in HEALTHY_SURVEY.reaches if not each.named]
    reaches += [replace(each, named=True) for each in reaches if each.address.startswith("10.78.")]
    return replace(HEALTHY_SURVEY, reaches=tuple(reaches))


def changed(name: str, **changes: object) -> Survey:
    facts = dict(HEALTHY_SURVEY.answering)[name]
    return with_facts(HEALTHY_SURVEY, name, replace(facts, **changes))  # type: ignore[arg-type]


def with_job(**changes: object) -> Survey:
    assert HEALTHY_SURVEY.allreduce is not None
    return replace(HEALTHY_SURVEY, allreduce=replace(HEALTHY_SURVEY.allreduce, **changes))  # type: ignore[arg-type]


def renamed(name: str, host: str) -> Survey:
    return changed(name, host=host)


TWICE = with_facts(HEALTHY_SURVEY, "node3", host_facts(2))
AHEAD = replace(
    HEALTHY_SURVEY, hosts=tuple(replace(host, offset_s=40.0 * (host.name == "node2")) for host in HEALTHY_SURVEY.hosts)
)
NO_WAY_BACK = replace(
    HEALTHY_SURVEY,
    logins=(Login("node2", "node1", Failure(255, "Permission denied (publickey).")), Login("node3", "node1")),
)
BOUND = tuple(Rank(n, NAMES[n // 2], 6, 1 if n == 2 else 16) for n in range(6))
ALONE = tuple(Rank(0, NAMES[n // 2], 1, 16) for n in range(6))
ONE_GPU = tuple(Rank(n, NAMES[n // 2], 6, 16, "0" if n < 2 else "01"[n % 2]) for n in range(6))
PACKAGES = dict(HEALTHY_SURVEY.here.packages)

# Fault -> the survey, the finding's name and severity, hosts that it names.
BROKEN: dict[str, tuple[Survey, str, str, tuple[str, ...]]] = {
    "NCCL that hangs with unequal hosts": (with_nccl("2.31.2", (2, 2, 1)), "nccl-uneven-hosts", "error", NAMES),
    "9 a name that one host does not know": (looked_up("node2", "node3"), "name-unknown", "error", ("node2",)),
    "9 a name that is loopback": (looked_up("node1", "node3", "127.0.1.1"), "name-loopback", "error", ("node1",)),
    "9 a name of somebody else": (looked_up("node1", "node3", "10.9.9.9"), "name-other-host", "error", ("node1",)),
    "9 a master that is no host of the job": (
        replace(
            with_environ(HEALTHY_SURVEY, MASTER_ADDR="login1"),
            lookups=(*HEALTHY_SURVEY.lookups, *(Lookup(name, "login1", ("10.1.1.1",)) for name in NAMES)),
        ),
        "master-address",
        "error",
        ("node1",),
    ),
    "9 a master that nobody knows": (
        replace(
            with_environ(HEALTHY_SURVEY, MASTER_ADDR="node7"),
            lookups=(*HEALTHY_SURVEY.lookups, *(Lookup(name, "node7", ()) for name in NAMES)),
        ),
        "master-address",
        "error",
        ("node1",),
    ),
    "a wrong subnet": (looked_up("node2", "node3", "192.168.103.10"), "wrong-subnet", "error", ("node2",)),
    "a firewall": (blocked("node2", "node3"), "port-unreachable", "error", ("node2",)),
    "10 the slow network": (slow_names(), "slow-network", "warning", ()),
    "10 an interface that leads nowhere": (
        with_environ(HEALTHY_SURVEY, NCCL_SOCKET_IFNAME="eth1"),
        "interface-apart",
        "error",
        NAMES,
    ),
    "another Keras": (changed("node2", packages={**PACKAGES, "keras": "3.14.0"}), "versions", "error", ("node2",)),
    "another Python": (changed("node3", python="3.12.1"), "versions", "error", ("node3",)),
    "nearly the same Python": (changed("node3", python="3.11.9"), "versions", "warning", ("node3",)),
    "another hvdkit": (changed("node3", hvdkit="0.2.0"), "versions", "error", ("node3",)),
    "12 another MPI": (
        changed("node2", mpi=replace(HEALTHY_SURVEY.here.mpi, library="Open MPI v4.1.6, x")),
        "versions",
        "error",
        ("node2",),
    ),
    "a host twice": (TWICE, "host-twice", "error", ("node2", "node3")),
    "a hostname twice": (renamed("node3", "node2"), "hostname-twice", "error", ("node2", "node3")),
    "9 another name": (renamed("node3", "ip-10-0-0-3"), "hostname-differs", "note", ("node3",)),
    "a clock ahead": (AHEAD, "clock-differs", "warning", ("node2",)),
    "14 no ssh back": (NO_WAY_BACK, "ssh-between", "warning", ("node2",)),
    "14 no ssh": (
        without(HEALTHY_SURVEY, "node2", Failure(255, "root@node2: Permission denied (publickey).")),
        "ssh-login",
        "error",
        ("node2",),
    ),
    "14 no environment": (
        without(HEALTHY_SURVEY, "node2", Failure(1, "/env/bin/python: No module named hvdkit")),
        "hvdkit-missing",
        "error",
        ("node2",),
    ),
    "a host that is down": (
        without(HEALTHY_SURVEY, "node2", Failure(255, "ssh: connect to host node2 port 22: Connection timed out")),
        "host-unreachable",
        "error",
        ("node2",),
    ),
    "12 ranks that are alone": (with_job(ranks=ALONE), "singletons", "error", ()),
    "4 a rank on one core": (with_job(ranks=BOUND), "rank-one-core", "warning", ("node2",)),
    "7 a GPU for two ranks": (with_job(ranks=ONE_GPU), "gpu-for-two-ranks", "error", ("node1",)),
    "a job that fails": (with_job(error="it ended with status 1: boo"), "job-fails", "error", ()),
    "a slow job": (with_job(seconds=2.0), "allreduce-slow", "warning", ()),
    "17 more ranks than slots": (HEALTHY_SURVEY, "slots", "error", ()),
    "fault of one host": (
        with_facts(HEALTHY_SURVEY, "node3", replace(host_facts(3), settings_error="HVDKIT_X='y'")),
        "settings",
        "error",
        ("node3",),
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_found_and_nothing_else(fault: str) -> None:
    survey, name, severity, hosts = BROKEN[fault]
    job = replace(JOB, ranks=8) if fault.startswith("17") else JOB
    findings = evaluate(survey, job)
    assert [(finding.name, finding.severity, finding.hosts) for finding in findings] == [(name, severity, hosts)]
    assert findings[0].cure


def test_healthy_hosts_have_no_findings() -> None:
    assert evaluate(HEALTHY_SURVEY, JOB) == []
    assert evaluate(with_environ(HEALTHY_SURVEY, OMPI_MCA_btl_tcp_if_include="10.77.0.0/24"), JOB) == []
    assert evaluate(replace(HEALTHY_SURVEY, allreduce=None), JOB) == []
    assert evaluate(with_nccl("2.31.2", (2, 2, 2)), JOB) == evaluate(with_nccl("2.32.3", (2, 2, 1)), JOB) == []


def test_what_is_wrong_everywhere_is_told_once() -> None:
    findings = evaluate(with_environ(HEALTHY_SURVEY, GLOO_SOCKET_IFNAME="lo"), JOB)
    assert [finding.name for finding in findings] == ["interface-inside"]
    assert findings[0].hosts == NAMES


def test_networks_that_all_share_are_found_the_fastest_first() -> None:
    assert find_common_subnets(HEALTHY_SURVEY) == ["10.77.0.0/24", "10.78.0.0/24"]
    assert find_common_subnets(blocked("node1", "node2")) == []


def test_many_hosts_try_some_of_the_others_only() -> None:
    names = [f"n{number}" for number in range(100)]
    assert list_peers("n1", names[:3], 8) == ["n2", "n0"]
    assert list_peers("n98", names, 8) == ["n99", "n0", "n1", "n2"]
    assert list_peers("x", names, 8) == []


def test_a_ring_needs_each_byte_nearly_twice() -> None:
    assert expect_seconds(10**9 // 8, 2, 1000.0) == pytest.approx(1.0)
    assert expect_seconds(10**9 // 8, 4, 1000.0) == pytest.approx(1.5)
    assert expect_seconds(1000, 1, 1000.0) == expect_seconds(1000, 4, 0.0) == 0.0


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("ssh: Could not resolve hostname node9: Name or service not known", "name-unknown"),
        ("Host key verification failed.", "ssh-host-key"),
        ("root@node2: Permission denied (publickey,password).", "ssh-login"),
        ("ssh: connect to host node2 port 22: Connection refused", "ssh-refused"),
        ("ssh: connect to host node2 port 22: No route to host", "host-unreachable"),
        ("/env/bin/python: Error while finding (ModuleNotFoundError: No module named 'hvdkit')", "hvdkit-missing"),
        ("env: '/env/bin/python': No such file or directory", "python-missing"),
        ("env: '/env/bin/python': Permission denied", "python-missing"),
        ("/env/bin/python: error while loading shared libraries: libpython3.so", "python-missing"),
        ("Boo!", "ssh-fails"),
        ("", "ssh-fails"),
    ],
)
def test_why_there_is_no_agent(said: str, name: str) -> None:
    finding = explain("node2", Failure(255, said), "ssh")
    assert finding.name == name
    assert "{" not in finding.seen + finding.cure


def test_a_message_of_srun_is_not_taken_for_one_of_ssh() -> None:
    finding = explain(
        "node2", Failure(1, "srun: error: res_nsearch error: Unknown host\nsrun: fatal: no config"), "srun"
    )
    assert finding.name == "srun-fails" and "srun: fatal: no config" in finding.seen
    assert explain("node2", Failure(1, "env: '/env/bin/python': No such file"), "srun").name == "python-missing"


def test_the_command_lines_that_start_agents_are_quoted() -> None:
    command = agent_command({"PATH": "/a b:/c", "SECRET": "x", "PYTHONPATH": "/it's"}, "/my env/python")
    assert command[0] == "env" and "x" not in " ".join(command)
    argv = ssh_argv("me@node1", command)
    assert argv[-3:-1] == ["--", "me@node1"] and "'PATH=/a b:/c'" in argv[-1] and "'/my env/python'" in argv[-1]
    assert "BatchMode=yes" in argv
    assert srun_argv("node1", command)[-len(command) :] == command


def test_a_checkout_that_is_not_installed_reaches_the_other_hosts() -> None:
    assert with_own_folder({"A": "b"}, "/src", "/env") == {"A": "b", "PYTHONPATH": "/src"}
    assert with_own_folder({"PYTHONPATH": "/x"}, "/src", "/env") == {"PYTHONPATH": "/src:/x"}
    assert with_own_folder({"PYTHONPATH": "/x:/src"}, "/src", "/env") == {"PYTHONPATH": "/x:/src"}
    assert with_own_folder({}, "/env/lib/site-packages", "/env") == {}


def test_only_agents_of_the_survey_are_answered_and_only_the_right_host_answers() -> None:
    port = start_responder("secret", "a")
    assert try_connection("localhost", port, "secret", "a") == ""
    assert try_connection("127.0.0.1", port, "secret", "b") == "other"
    assert try_connection("127.0.0.1", port, "another secret", "a") == "other"
    assert try_connection("127.0.0.1", 1, "secret", "a") == "refused"
    assert measure_bandwidth("127.0.0.1", port, "secret", "a") > 10
    assert measure_bandwidth("127.0.0.1", port, "another secret", "a") == 0.0


def test_facts_travel() -> None:
    there = json.loads(json.dumps(asdict(HEALTHY_SURVEY.here)))
    assert decode(HostFacts, there) == HEALTHY_SURVEY.here
    assert decode(HostFacts, {"host": "x", "colour": "red"}) == HostFacts(host="x")
    assert decode(Survey, json.loads(json.dumps(asdict(HEALTHY_SURVEY)))) == HEALTHY_SURVEY


@pytest.mark.parametrize("fault", [None, *BROKEN])
def test_every_survey_can_be_shown(fault: str | None) -> None:
    survey = BROKEN[fault][0] if fault else HEALTHY_SURVEY
    findings = evaluate(survey, JOB)
    console = Console(record=True, width=150)
    print_verdict(findings, console)
    print_survey_tables(survey, console)
    shown = console.export_text()
    assert all(name in shown for name in NAMES)
    document = json.loads(json.dumps(build_survey_document(survey, findings, code=0)))
    assert len(document["findings"]) == len(findings)
    assert {host["name"] for host in document["hosts"]} == set(NAMES)


@given(st.data())
def test_no_loss_of_answers_is_a_traceback(data: st.DataObject) -> None:
    """Whatever did not come, of whatever host."""
    survey = HEALTHY_SURVEY
    for name in NAMES:
        if data.draw(st.booleans()):
            survey = without(survey, name, Failure(data.draw(st.sampled_from([None, 1, 255])), data.draw(st.text())))
    kept = data.draw(st.integers(0, len(survey.reaches)))
    survey = replace(survey, reaches=survey.reaches[:kept], lookups=survey.lookups[: data.draw(st.integers(0, 9))])
    findings = evaluate(survey, JOB)
    console = Console(width=100, file=io.StringIO())
    print_verdict(findings, console)
    print_survey_tables(survey, console)
    assert {host.name for host in survey.hosts if host.failure} <= {name for each in findings for name in each.hosts}


def test_a_job_that_is_no_slower_than_the_network_is_not_slow() -> None:
    assert not Allreduce(1 << 24, 0.35, 0.1).slow
    assert Allreduce(1 << 24, 0.45, 0.1).slow
    assert not Allreduce(1 << 24, 10.0, 0.0).slow
