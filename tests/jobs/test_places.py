"""Hosts from Flux, HTCondor, SageMaker, Torque and SGE: their variables and files, in the form that each documents."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hvdrun_job import ROOT
from hypothesis import given
from hypothesis import strategies as st
from planned_job import plan_job
from refused import refused

from hvdkit.launch.allocations import read_allocation
from hvdkit.launch.allocations.schedulers import parse_idset, parse_resources
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.hostfiles import FoundHosts, Host

# The example of ENVIRONMENT_VARIABLES.md of the training toolkit.
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-1",
    "SM_NUM_GPUS": "1",
    "SM_NUM_CPUS": "32",
    "SM_NETWORK_INTERFACE_NAME": "ethwe",
}
# The example of Flux RFC 20, and one with GPUs.
CORES = {
    "version": 1,
    "execution": {
        "R_lite": [
            {"rank": "0", "children": {"core": "0-3"}},
            {"rank": "1-2", "children": {"core": "0-1,7"}},
        ],
        "nodelist": ["node[186-187]", "login1"],
        "starttime": 1552593348.073045,
        "expiration": 1552593647.411336,
    },
}
GPUS = {
    "version": 1,
    "execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-31", "gpu": "0-3"}}], "nodelist": ["gpu[1-2]"]},
}


def read(environ: dict[str, str], slots: int | None = None) -> FoundHosts:
    found = read_allocation(environ, slots)
    assert found is not None and found.allocated
    return found


def test_sagemaker_has_a_rank_for_each_gpu_of_each_host() -> None:
    found = read(SAGEMAKER)
    assert (found.hosts, found.interface) == ((Host("algo-1", 1), Host("algo-2", 1)), "ethwe")
    assert [host.slots for host in read({**SAGEMAKER, "SM_NUM_GPUS": "8"}).hosts] == [8, 8]
    assert [host.slots for host in read({**SAGEMAKER, "SM_NUM_GPUS": "0"}).hosts] == [1, 1]
    assert [host.slots for host in read(SAGEMAKER, slots=4).hosts] == [4, 4]


def test_the_interface_of_sagemaker_is_used_unless_one_is_named() -> None:
    environ = {**SAGEMAKER, "SM_HOSTS": '["localhost"]', "SM_CURRENT_HOST": "localhost", "PATH": "/usr/bin:/bin"}
    assert plan_job(parse_arguments(["true"]), environ).networks == ("ethwe",)
    named = plan_job(parse_arguments(["--network-interfaces", "eth1", "true"]), environ)
    assert named.networks == ("eth1",) and "--network-interfaces has no effect" in " ".join(named.notes)
    assert plan_job(parse_arguments(["-H", "localhost:2", "true"]), environ).networks == ()


def test_the_entry_point_of_sagemaker_passes_sigterm_on_and_waits_for_the_end_of_the_job(tmp_path: Path) -> None:
    script = (ROOT / "examples" / "sagemaker" / "train.sh").read_text()
    script = script.replace("/usr/sbin/sshd", "true").replace("/run/sshd", str(tmp_path / "sshd"))
    hvdrun = tmp_path / "hvdrun"
    hvdrun.write_text(f"""#!{sys.executable}
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(*sys.argv[1:], flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(75)
""")
    hvdrun.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    environ = {**SAGEMAKER, "SM_HOSTS": '["algo-1"]', "PATH": path}
    with subprocess.Popen(["bash", "-c", script, "train.sh", "--lr", "1"], env=environ, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stdout.readline() == b"python train.py --lr 1\n"
        job.terminate()
        assert job.wait() == 75, "the exit code of hvdrun, after its end"


@pytest.mark.parametrize(
    ("changed", "code", "names"),
    [
        ({"SM_CURRENT_HOST": "algo-2"}, "sagemaker-not-first-host", ["2 hosts", "this is algo-2", "on algo-1 only"]),
        ({"SM_CURRENT_HOST": "algo-7"}, "sagemaker-host", ["SM_CURRENT_HOST='algo-7'", SAGEMAKER["SM_HOSTS"]]),
        ({"SM_HOSTS": "algo-1,algo-2"}, "sagemaker-hosts", ["SM_HOSTS='algo-1,algo-2'"]),
        ({"SM_HOSTS": "[]"}, "sagemaker-hosts", ["SM_HOSTS='[]'", "not a list"]),
        ({"SM_HOSTS": '["algo-1", 2]'}, "sagemaker-hosts", ["""SM_HOSTS='["algo-1", 2]'""", "not a list"]),
        ({"SM_HOSTS": '["algo-1", "algo-1"]'}, "sagemaker-hosts", ["""SM_HOSTS='["algo-1", "algo-1"]'""", "twice"]),
        ({"SM_HOSTS": '["-oProxyCommand=x"]'}, "sagemaker-hosts", ["'-oProxyCommand=x'", "option"]),
        ({"SM_HOSTS": "[" * 100_000}, "sagemaker-hosts", ["SM_HOSTS='[[["]),
        ({"SM_NUM_GPUS": "all"}, "sagemaker-gpus", ["SM_NUM_GPUS='all'"]),
        ({"SM_NETWORK_INTERFACE_NAME": "eth0;x"}, "sagemaker-interface", ["SM_NETWORK_INTERFACE_NAME='eth0;x'"]),
    ],
)
def test_what_sagemaker_never_says_is_an_error(changed: dict[str, str], code: str, names: list[str]) -> None:
    with refused(code, names=names):
        read_allocation({**SAGEMAKER, **changed})


def fake_flux(folder: Path, answers: dict[str, object]) -> dict[str, str]:
    """The variables of a Flux instance whose `flux` answers to these words, and fails for others."""
    lines = [f"{shlex.quote(words)}) echo {shlex.quote(json.dumps(said))} ;;" for words, said in answers.items()]
    body = "\n".join(lines)
    flux = folder / "flux"
    flux.write_text(f'#!/bin/sh\ncase "$*" in\n{body}\n*) echo "flux: $*: no such command" >&2; exit 3 ;;\nesac\n')
    flux.chmod(0o755)
    return {"FLUX_URI": "local:///tmp/flux-x/local-0", "PATH": f"{folder}:/usr/bin:/bin"}


def test_flux_has_a_rank_for_each_core_or_gpu_of_the_instance(tmp_path: Path) -> None:
    environ = fake_flux(tmp_path, {"resource R": CORES})
    found = read(environ)
    assert found.hosts == (Host("node186", 4), Host("node187", 3), Host("login1", 3))
    assert found.source == "the Flux instance"
    assert "a slot for each core" in found.notes[0] and "--slots-per-host" in found.notes[0]
    assert (read(environ, slots=2).hosts[0], read(environ, slots=2).notes) == (Host("node186", 2), ())
    found = read(fake_flux(tmp_path, {"resource R": GPUS}))
    assert (found.hosts, "each GPU" in found.notes[0]) == ((Host("gpu1", 4), Host("gpu2", 4)), True)


def test_a_flux_job_of_one_task_has_the_resources_of_the_job(tmp_path: Path) -> None:
    environ = fake_flux(tmp_path, {"job info f2gnzHbW R": GPUS, "resource R": CORES})
    environ |= {"FLUX_JOB_ID": "f2gnzHbW", "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}
    found = read(environ)
    assert (found.hosts[0].name, found.source) == ("gpu1", "Flux job f2gnzHbW")
    with refused("started-by-flux-run", names=["4 times"]):
        read({**environ, "FLUX_JOB_SIZE": "4"})


def test_a_flux_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    with refused("flux-missing", names=["FLUX_URI", "PATH"]):
        read_allocation({"FLUX_URI": "local:///x", "PATH": str(tmp_path)})
    names = ["flux resource R: ", "status 3: flux: resource R: no such command"]
    with refused("flux-failed", names=names):
        read_allocation(fake_flux(tmp_path, {}))
    with refused("flux-output", names=["flux resource R: ", '{"version": 1}', "version 1"]):
        read_allocation(fake_flux(tmp_path, {"resource R": {"version": 1}}))
    few = {"version": 1, "execution": {**CORES["execution"], "nodelist": ["a"]}}  # type: ignore[dict-item]
    with refused("flux-output", names=["resources of 3 ranks, and 1 hosts"]):
        read_allocation(fake_flux(tmp_path, {"resource R": few}))


KEYS = st.sampled_from(["execution", "R_lite", "nodelist", "rank", "children", "core"])
LEAVES = st.none() | st.integers() | st.text(max_size=5)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner)))
def test_any_resources_are_hosts_or_a_value_error(resources: object) -> None:
    try:
        hosts = parse_resources(json.dumps(resources))
    except ValueError as error:
        assert str(error)
    else:
        assert hosts


def test_idsets() -> None:
    assert [parse_idset(text) for text in ("0-3,7", "[1,3]", "", "5")] == [[0, 1, 2, 3, 7], [1, 3], [], [5]]
    for text in ("3-1", "a", "1-", "0-99999999", "-1"):
        with pytest.raises(ValueError, match="not a list of numbers"):
            parse_idset(text)


def contacts(folder: Path, text: str, **more: str) -> dict[str, str]:
    """A parallel job's variables on node 0, with a contact file: node, host, port, user, folder, time."""
    (folder / "contact").write_text(text)
    return {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "3", "_CONDOR_SCRATCH_DIR": str(folder), **more}


CONTACT = """\
2 b.site.org 4446 nobody /var/condor/execute/dir_7 1234567890
0 a.site.org 4444 nobody /var/condor/execute/dir_5 1234567890
1 a.site.org 4445 nobody /var/condor/execute/dir_6 1234567890
"""


def test_htcondor_has_a_rank_for_each_node_of_a_parallel_job(tmp_path: Path) -> None:
    environ = contacts(tmp_path, CONTACT)
    assert read(environ).hosts == (Host("a.site.org", 2), Host("b.site.org", 1))
    assert read(environ, slots=4).hosts == (Host("a.site.org", 4), Host("b.site.org", 4))
    other = tmp_path / "other"
    other.write_text("0 c 22 x\n")
    assert read({**environ, "CONDOR_CONTACT_FILE": str(other)}).hosts == (Host("c", 1),)
    assert read_allocation({"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "1"}) is None


def test_htcondor_without_its_sshds_is_an_error(tmp_path: Path) -> None:
    environ = contacts(tmp_path, CONTACT)
    with refused("htcondor-not-first-node", names=["3 nodes", "this is node 2"]):
        read_allocation({**environ, "_CONDOR_PROCNO": "2"})
    with refused("htcondor-contact", names=["contact:2: '-x'"]):
        read_allocation(contacts(tmp_path, "0 a 22\n1 -x 22\n"))
    with refused("htcondor-no-contacts", names=[str(tmp_path / "contact")]):
        read_allocation(contacts(tmp_path, ""))
    (tmp_path / "contact").unlink()
    with refused("htcondor-contact-file", names=[str(tmp_path / "contact"), "No such file or directory"]):
        read_allocation(environ)


def test_torque_is_told_of_ppn(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\n")
    environ = {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(nodes), "PBS_NUM_NODES": "2", "PBS_NUM_PPN": "2"}
    found = read(environ)
    assert (found.hosts, found.notes) == ((Host("a", 2), Host("b", 2)), ())
    assert "-l nodes=N:ppn=M" in found.more_slots_hint
    nodes.write_text("a\nb\n")
    assert "ppn=M" in read(environ).notes[0]


def test_the_hosts_of_sge_are_as_many_as_it_says(tmp_path: Path) -> None:
    hosts = tmp_path / "pe_hostfile"
    hosts.write_text("a.site 4 all.q@a.site <NULL>\nb.site 2 all.q@b.site <NULL>\n")
    environ = {"PE_HOSTFILE": str(hosts), "JOB_ID": "7", "NSLOTS": "6", "NHOSTS": "2"}
    assert read(environ).hosts == (Host("a.site", 4), Host("b.site", 2))
    with refused("sge-hosts-differ", names=["SGE job 7", "NHOSTS=3", "2 hosts"]):
        read_allocation({**environ, "NHOSTS": "3"})
