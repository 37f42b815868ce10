"""Options and facts of jobs that cannot be started: a call for each place in the plan that raises LaunchError."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bad_hostfiles import BAD_HOSTFILES

from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.detect.gpus import choose_ranks, count_gpus
from hvdkit.launch.detect.hosts import find_hosts
from hvdkit.launch.elastic.options import find_discovered
from hvdkit.launch.facts import Facts, KnownHost
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.hostfiles.dialects import DIALECTS, convert, find_dialect
from hvdkit.launch.hostfiles.parsing import parse_host_list, parse_hostfile
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.options import LaunchOptions, check_options
from hvdkit.launch.plan.environment import plan_rank_variables, withhold
from hvdkit.launch.plan.gpu_sharing import GpuSharing
from hvdkit.launch.plan.job import Job, plan_ranks
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.plan.network import HostInterfaces, choose_network, parse_interfaces, parse_wish
from hvdkit.launch.plan.resources import HostResources, check_gpus, plan_shared_gpus
from hvdkit.launch.plan.selected_launcher import LauncherEnvironment, SelectedLauncher, select_launcher
from hvdkit.launch.plan_job import plan_job, read_sent
from hvdkit.launch.plan_start import plan_start
from hvdkit.launch.run_api import make_options, run

HOSTS = (Host("node1", 2), Host("node2", 2))
UNEVEN = (Host("node1", 2), Host("node2", 4))
WITH_USER = (Host("node1", 3, user="alice"),)
OPEN_MPI = Mpi("open_mpi", "Open MPI", "5.0.11", "/opt/bin/mpirun")
MPICH = Mpi("mpich", "MPICH", "5.0.2", "/opt/bin/mpirun")
INTEL = Mpi("intel_mpi", "Intel MPI", "2021.14", "/opt/bin/mpirun")
PALS = SelectedLauncher("mpiexec", "", mpi=Mpi("pals", "Cray PALS", "1.3.4", "/opt/bin/mpiexec"))
JSRUN = SelectedLauncher("jsrun", "", "/opt/bin/jsrun")
SRUN = {"srun": "/usr/bin/srun"}
NO_MPI = "There is no mpirun on PATH."
GPUS = (("0000:07:00.0", "0-3"), ("0000:0f:00.0", "0-3"))


def facts(*hosts: Host, ranks: int | None = 3, unknown: str = "") -> Facts:
    return Facts(
        environ={"PATH": "/bin"},
        found=FoundHosts(hosts, "-H"),
        hosts={host.login: KnownHost(local=False, known=host.name != unknown, address="10.0.0.1") for host in hosts},
        requested_ranks=ranks,
        command=("true",),
    )


def plan(known: Facts | None = None, *, command: tuple[str, ...] = ("true",), **options: Any) -> Job:
    return plan_job(LaunchOptions(command=command, **options), known or facts())


def send(*words: str) -> dict[str, str]:
    return read_sent(words, {"PATH": "/bin"}, ("HVDKIT_BIND",), local=False)


def select(wish: str = "", **environment: Any) -> SelectedLauncher:
    return select_launcher(LauncherEnvironment(**environment), wish)


def build(choice: SelectedLauncher, hosts: tuple[Host, ...] = HOSTS, ranks: int = 4, **more: Any) -> object:
    return build_launch(Job(command=("true",), ranks=ranks, hosts=hosts, local=False, environ={}, **more), choice)


def number(**environ: str) -> object:
    return plan_rank_variables({0: "a", 1: "a", 2: "b"}, "10.0.0.1", (20001, 20002), "77", environ)


def choose_interface(*wish: str) -> object:
    rows = {"a": ("eno1", "10.1.0.1"), "b": ("eno2", "10.1.0.2")}
    hosts = {host: HostInterfaces(parse_interfaces([[*row, 24, 0]])) for host, row in rows.items()}
    return choose_network(hosts, wish)


#: Code -> calls that raise LaunchError with it.
CASES: dict[str, list[Callable[[], object]]] = {
    "binding-contradicts": [lambda: plan(settings={"HVDKIT_BIND": "core"}, binding_args="--bind-to core")],
    "bug-launcher-without-mpi": [lambda: SelectedLauncher("mpirun", "").own_mpi],
    "bug-launchers-not-examined": [lambda: plan_start(LaunchOptions(np=3, command=("true",)), facts())],
    "cooldown-range": [lambda: plan(blacklist_cooldown_range=(3, 1))],
    "environment-contradicts": [lambda: number(WORLD_SIZE="8", RANK="0")],
    "gpu-missing": [
        lambda: count_gpus({"PATH": "none", "CUDA_VISIBLE_DEVICES": "0"}, Path("/none/gpus"), Path("/none"))
    ],
    "gpus-shared": [lambda: check_gpus([("n1", HostResources(gpus=GPUS))] * 3, GpuSharing.REFUSED_BY_NP)],
    "host-is-ipv6": [lambda: build(SelectedLauncher("mpirun", "", mpi=OPEN_MPI), (Host("fe80::1", 4),))],
    "host-with-user": [
        lambda: build(JSRUN, WITH_USER, 3),
        lambda: build(SelectedLauncher("mpirun", "", mpi=MPICH), WITH_USER, 3),
    ],
    "hostfile-format-unknown": [lambda: find_dialect("pigeon")],
    "hostfile-format-without-file": [lambda: find_hosts(None, None, {}, format="slurm")],
    "hostfile-invalid": [
        *(partial(parse_hostfile, text, name, name) for name, bad in BAD_HOSTFILES.items() for text, _ in bad),
        lambda: parse_hostfile("good slots=1\nnode1:4\n\nnode2 slots=four\nnode3 cores=2\n-oProxy=x\n", "hosts"),
        lambda: parse_hostfile("node4 slots=4 max_slots=2\n", "hosts", "openmpi"),
        lambda: parse_hostfile("", "hosts"),
    ],
    "hosts-given-twice": [
        lambda: find_hosts("node1:2", "hosts", {}),
        lambda: find_discovered(LaunchOptions(host_discovery_script="./hosts.sh", hosts="node1:2"), {}, print),
        lambda: run(len, hosts="node1:2", hostfile="hosts"),
    ],
    "hosts-invalid": [lambda: parse_host_list("node1:four,-oProxy=x")],
    "hosts-not-in-format": [
        lambda: convert((Host("n1", None), *WITH_USER, Host("fe80::1", 2)), DIALECTS["machinefile"])
    ],
    "hosts-unknown": [lambda: plan(facts(*HOSTS, unknown="node2"))],
    "jsrun-missing": [lambda: select("jsrun")],
    "launcher-not-of-pals": [lambda: select("ssh", mpi=PALS.mpi), lambda: select("mpirun", mpi=PALS.mpi)],
    "launcher-unknown": [lambda: LaunchOptions(launcher="rsh")],
    "launchers-contradict": [lambda: parse_arguments(["--jsrun", "--launcher", "ssh", "-np", "3", "true"])],
    "master-port-invalid": [lambda: number(MASTER_PORT="70000")],
    "max-np-too-small": [lambda: plan(max_np=2)],
    "min-np-too-large": [lambda: plan(min_np=5)],
    "mpi-missing": [lambda: select(no_mpi=NO_MPI), lambda: select("ssh", no_mpi=NO_MPI)],
    "network-invalid": [lambda: parse_wish("eth0 eth1,10.0.0.0/33")],
    "network-missing": [lambda: choose_interface("eno1")],
    "not-a-slurm-job": [lambda: select("srun", programs=SRUN)],
    "not-an-lsf-job": [lambda: select("jsrun", programs={"jsrun": "/opt/bin/jsrun"})],
    "not-enough-slots": [
        lambda: plan_ranks(5, HOSTS, {}),
        lambda: plan_ranks(5, HOSTS, {}, more_slots_hint="request more from Slurm with --ntasks-per-node"),
    ],
    "np-gpu-on-hosts": [lambda: choose_ranks("gpu", HOSTS, local=False, cores=2, environ={})],
    "np-invalid": [lambda: LaunchOptions(np="many"), lambda: plan_ranks(0, (), {})],
    "np-missing": [
        lambda: plan_ranks(None, (), {}),
        lambda: plan(facts(ranks=None), command=("train.py", "-np", "3")),
    ],
    "option-quotes": [lambda: plan(mpi_args="'open")],
    "option-unknown": [lambda: make_options(3, {"pigeon": 1})],
    "options-contradict": [
        lambda: check_options(LaunchOptions(quiet=True, verbose=True)),
        lambda: run(len, use_gloo=True, use_mpi=True),
    ],
    "output-directory-empty": [lambda: check_options(LaunchOptions(output_filename=""))],
    "ranks-uneven": [lambda: build(PALS, UNEVEN, 6), lambda: build(JSRUN, UNEVEN, 6)],
    "setting-needs-elastic": [lambda: plan(settings={"HVDKIT_ELASTIC_SAVE_S": "3"})],
    "setting-needs-wrap": [lambda: plan(settings={"HVDKIT_WRAP_WARMUP": "3"})],
    "setting-unknown": [lambda: send("HVDKIT_BINDS=core")],
    "share-gpus-on-hosts": [lambda: plan_shared_gpus(2, {})],
    "show-ranks-invalid": [lambda: plan(show_ranks=frozenset({3}))],
    "slots-invalid": [lambda: find_hosts(None, None, {}, slots=0)],
    "srun-missing": [lambda: select("srun")],
    "srun-plugin-missing": [
        lambda: select("srun", scheduler="slurm", programs=SRUN, mpi=OPEN_MPI, pmi=("none", "pmi2")),
        lambda: select("", scheduler="slurm", programs=SRUN, cray=True, pmi=("pmix",)),
    ],
    "srun-plugin-unknown": [lambda: select("srun", scheduler="slurm", programs=SRUN, pmi=("none", "pmi2", "pmix"))],
    "srun-pmi-library": [lambda: select("srun", scheduler="slurm", programs=SRUN, mpi=INTEL)],
    "ssh-options-unused": [
        lambda: build(JSRUN, ssh_options=("-p", "22")),
        lambda: check_options(LaunchOptions(ssh_port=22, launcher="srun")),
    ],
    "variable-contradicts": [lambda: plan(env=("HVDKIT_BIND=core",), settings={"HVDKIT_BIND": "none"})],
    "variable-given-twice": [lambda: send("LEVEL=1", "LEVEL=2")],
    "variable-name-invalid": [lambda: send("1A=2")],
    "variable-not-set": [lambda: send("LEVEL")],
    "variable-of-launcher": [lambda: send("RANK=1")],
    "variable-required": [lambda: withhold({"PATH": "/bin"}, ["PATH"])],
    "variable-with-line-break": [lambda: send("TEXT=a\nb")],
}
