"""SageMaker on these hosts: the mpirun command line of its training toolkit, and hvdrun with its variables."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import debian, open_mpi_4
from cluster.jobs import MEET
from cluster.lab import ROOT, Lab, environment

pytestmark = pytest.mark.cluster

HOSTS = ("node1", "node2")


def toolkit_command(
    hosts: tuple[str, ...], processes: int, interface: str, names: list[str], *script: str
) -> list[str]:
    """The command of sagemaker_training/mpi.py (aws/sagemaker-training-toolkit), option by option.

    It sets LD_PRELOAD too, to a library that answers gethostname() with SM_CURRENT_HOST.
    """
    command = [
        "mpirun",
        "--host",
        ",".join(f"{host}:{processes}" for host in hosts),
        "-np",
        f"{len(hosts) * processes}",
    ]
    command += ["--allow-run-as-root", "--display-map", "--tag-output"]
    command += ["-mca", "btl_tcp_if_include", interface, "-mca", "oob_tcp_if_include", interface]
    command += ["-mca", "plm_rsh_no_tree_spawn", "1", "-bind-to", "socket", "-map-by", "slot"]
    command += ["-mca", "pml", "ob1", "-mca", "btl", "^openib", "-mca", "orte_abort_on_non_zero_status", "1"]
    for variable in ("NCCL_MIN_NRINGS=4", f"NCCL_SOCKET_IFNAME={interface}", "NCCL_DEBUG=INFO"):
        command += ["-x", variable]
    for name in ("LD_LIBRARY_PATH", "PATH", *names):
        command += ["-x", name]
    return [*command, *script]


def variables(host: str, **more: str) -> dict[str, str]:
    return {
        "SM_HOSTS": json.dumps(HOSTS),
        "SM_CURRENT_HOST": host,
        "SM_NUM_GPUS": "0",
        "SM_NUM_CPUS": "2",
        **more,
    }


def test_the_toolkits_own_mpirun_starts_hvdkit(lab: Lab, tmp_path: Path) -> None:
    try:
        usr = open_mpi_4.unpack(tmp_path / "openmpi")
    except RuntimeError as error:
        pytest.skip(str(error))
    python = open_mpi_4.make_python(tmp_path / "env")
    here = environment(PATH="/usr/bin:/bin", LD_LIBRARY_PATH="", **variables("node1"))
    names = sorted(name for name in here if name.startswith(("SM_", "PYTHON")))
    command = toolkit_command(HOSTS, 2, "10.77.0.0/24", names, python, "-m", "mpi4py", MEET)
    with debian.over_usr(lab, usr):
        done = lab.run("node1", command, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(re.findall(r"rank \d of .*", done.stdout))
    assert said == [f"rank {n} of 4 on {HOSTS[n // 2]}, {n % 2} of 2 there" for n in range(4)]


def test_open_mpi_5_does_not_understand_that_command(lab: Lab) -> None:
    """What docs/clusters/sagemaker.md says: it takes the value of an option with one dash for the program."""
    command = toolkit_command(HOSTS, 1, "10.77.0.0/24", [], "hostname")
    done = lab.run("node1", command, env=environment(LD_LIBRARY_PATH=""))
    assert done.returncode != 0 and "Executable: socket" in done.stdout + done.stderr


def test_hvdrun_on_the_first_host_starts_all_ranks(lab: Lab, tmp_path: Path) -> None:
    """examples/sagemaker/train.sh is started on each host, as the toolkit does with an entry point."""
    for host in HOSTS:
        (tmp_path / host).mkdir()
        shutil.copy(ROOT / "examples" / "sagemaker" / "train.sh", tmp_path / host)
        shutil.copy(MEET, tmp_path / host / "train.py")
    (tmp_path / "bin").mkdir()
    hvdrun = tmp_path / "bin" / "hvdrun"
    hvdrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m hvdkit.launch --slots-per-host 2 "$@"\n')
    hvdrun.chmod(0o755)
    found = environment()
    path = f"{tmp_path / 'bin'}:{found['PATH']}"

    def start(host: str) -> subprocess.Popen[str]:
        env = {**found, **variables(host, PATH=path, SM_NETWORK_INTERFACE_NAME="")}
        return lab.start(host, ["bash", "train.sh"], env=env, cwd=tmp_path / "node1")

    second, first = start("node2"), start("node1")
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, out + err
    said = sorted(re.findall(r"rank \d of .*", out))
    assert said == [f"rank {n} of 4 on {HOSTS[n // 2]}, {n % 2} of 2 there" for n in range(4)]
    assert "from SageMaker's SM_HOSTS" in err
    assert second.wait(20) == 0


def test_hvdrun_uses_the_interface_that_sagemaker_names(lab: Lab) -> None:
    """One name for all hosts, as in SageMaker's containers; here each has another, so that the choice is seen."""
    command = [sys.executable, "-m", "hvdkit.launch", "-np", "2", "hostname"]
    done = lab.run("node1", command, env=environment(**variables("node1", SM_NETWORK_INTERFACE_NAME="eth0")))
    assert (done.returncode, done.stdout) == (2, "")
    assert "SM_NETWORK_INTERFACE_NAME=eth0: ranks on different hosts use it" in done.stderr
    assert "--network-interfaces eth0 matches no interface of some hosts: node2 has ens5 10.77.0.12/24" in done.stderr
