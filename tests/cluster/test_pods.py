"""hvdrun in the launcher pod of an MPIJob and of a TrainJob: the operators' file, names and variables."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster.jobs import HVDRUN, MEET
from cluster.lab import Lab, environment
from cluster.network import wire_address

pytestmark = pytest.mark.cluster

# pkg/controller/mpi_job_controller.go of kubeflow/mpi-operator; pkg/runtime/framework/plugins/mpi and pkg/constants of
# kubeflow/trainer. The last ones are those of its pull request 4029, for Open MPI 5.
_ORTE = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
_PRTE = {
    "PRTE_MCA_prte_keep_fqdn_hostnames": "false",
    "PRTE_MCA_prte_default_hostfile": "/etc/mpi/hostfile",
    "PRTE_MCA_prte_set_default_slots": "2",
    "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10",
}
OPERATORS = {
    "MPIJob": ("train-worker-{}.train.default.svc", {"K_MPI_JOB_ROLE": "launcher", **_ORTE}),
    "TrainJob": ("train-node-0-{}.train", {"OMPI_MCA_orte_set_default_slots": "2", **_ORTE}),
    "TrainJob with PRTE": ("train-node-0-{}.train", {"OMPI_MCA_orte_set_default_slots": "2", **_ORTE, **_PRTE}),
}
# Gives a command an /etc/mpi/hostfile of its own: what it mounts, others do not see. ssh does not know the pods' names.
_POD = """
set -e
mount -t tmpfs tmpfs /mnt
mkdir -p /mnt/etc/mpi /mnt/work
cp -aL /etc/hosts /etc/hostname /etc/resolv.conf /etc/ssh /mnt/etc
sed -i 's/StrictHostKeyChecking yes/StrictHostKeyChecking no/' /mnt/etc/ssh/ssh_config
printf %s "$HOSTFILE" >/mnt/etc/mpi/hostfile
mount -t overlay -o lowerdir=/etc,upperdir=/mnt/etc,workdir=/mnt/work overlay /etc
exec "$@"
"""


@contextmanager
def pods(lab: Lab, name: str) -> Iterator[list[str]]:
    """Make pods of the hosts, with their names in /etc/hosts: node1 is the launcher's, the others are workers."""
    names = [name.format(number) for number in (0, 1)]
    lines = "".join(f"{wire_address(at)} {full} {full.split('.')[0]}\n" for at, full in enumerate(names, start=2))
    files = {host: lab.folder / "etc" / host / "hosts" for host in lab.names}
    before = {host: path.read_text() for host, path in files.items()}
    try:
        for host, path in files.items():
            with path.open("r+") as file:  # in its place, where it is mounted
                file.write(before[host] + lines)
        for host, pod in zip(lab.names, ("train-launcher", *(full.split(".")[0] for full in names)), strict=True):
            assert lab.run(host, ["hostname", pod]).returncode == 0
        yield names
    finally:
        for host, path in files.items():
            with path.open("r+") as file:
                file.write(before[host])
                file.truncate()
            lab.run(host, ["hostname", host])


def run_in_launcher(lab: Lab, names: list[str], variables: Mapping[str, str], *command: str) -> tuple[int, str, str]:
    """Run a command in the launcher's pod."""
    hostfile = "".join(f"{name} slots=2\n" for name in names)
    words = ["unshare", "--mount", "bash", "-c", _POD, "pod", *command]
    done = lab.run("node1", words, env=environment(HOSTFILE=hostfile, **variables))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("operator", OPERATORS)
def test_hvdrun_starts_ranks_on_all_workers(lab: Lab, operator: str) -> None:
    name, variables = OPERATORS[operator]
    with pods(lab, name) as names:
        code, out, err = run_in_launcher(lab, names, variables, *HVDRUN, sys.executable, MEET)
    assert code == 0, out + err
    hosts = [full.split(".")[0] for full in names]
    said = sorted(re.findall(r"rank \d of .*", out))
    assert said == [f"rank {n} of 4 on {hosts[n // 2]}, {n % 2} of 2 there" for n in range(4)]
    assert re.search(rf"4 ranks on {re.escape(names[0])}:2, {re.escape(names[1])}:2, from \w+_default_hostfile=", err)


def test_plain_mpirun_of_open_mpi_5_starts_all_ranks_in_the_launcher_of_an_mpijob(lab: Lab) -> None:
    """What docs/clusters/kubernetes.md says. If it fails, Open MPI reads the operator's variables: change the page."""
    name, variables = OPERATORS["MPIJob"]
    mpirun = str(Path(sys.prefix, "bin", "mpirun"))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with pods(lab, name) as names:
        code, out, err = run_in_launcher(lab, names, {**variables, **root}, mpirun, "-n", "2", "hostname")
    assert (code, out.split()) == (0, ["train-launcher"] * 2), err


@pytest.mark.parametrize("name", ["root", "mpiuser"])
def test_sshd_understands_the_configuration_of_the_image(lab: Lab, name: str, tmp_path: Path) -> None:
    """examples/kubernetes/sshd_NAME.conf, with a key in the place of the operator's."""
    text = (Path(__file__).parents[2] / "examples" / "kubernetes" / f"sshd_{name}.conf").read_text()
    config = tmp_path / "sshd_config"
    key = shlex.quote(str(lab.folder / "ssh" / "node1"))
    config.write_text(re.sub("(?m)^HostKey .*$", "", text) + f"HostKey {key}\n")
    done = lab.run("node1", ["/usr/sbin/sshd", "-t", "-f", config])
    assert (done.returncode, done.stderr) == (0, "")
