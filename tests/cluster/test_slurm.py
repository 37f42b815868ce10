"""A real Slurm: hvdrun and mpirun in a batch script, srun with and without the right PMI."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from cluster.jobs import MEET
from cluster.lab import ROOT, environment
from cluster.slurm import Slurm

pytestmark = pytest.mark.cluster

HVDRUN = f"{sys.executable} -m hvdkit.launch"
RANK = f"{sys.executable} {MEET}"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
#: What makes several ranks of Open MPI on few cores fast, where hvdrun is not there to say it.
OPEN_MPI = environment(
    OMPI_ALLOW_RUN_AS_ROOT="1",
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    OMPI_MCA_pml="ob1",
    OMPI_MCA_btl="^ofi,uct",
    OMPI_MCA_osc="^ucx",
    OMPI_MCA_btl_tcp_if_include="10.77.0.0/24",
    OMPI_MCA_mpi_yield_when_idle="1",
    PRTE_MCA_hwloc_default_binding_policy="none",
    PRTE_MCA_prte_if_include="10.77.0.0/24",
    PMIX_MCA_psec="native",
)


def said(output: str) -> list[str]:
    """What the ranks said of themselves, in their order."""
    return sorted(re.findall(r"rank \d of .*", output))


FOUR = [
    "rank 0 of 4 on node1, 0 of 2 there",
    "rank 1 of 4 on node1, 1 of 2 there",
    "rank 2 of 4 on node2, 0 of 2 there",
    "rank 3 of 4 on node2, 1 of 2 there",
]


def test_hvdrun_in_a_batch_script(slurm: Slurm, tmp_path: Path) -> None:
    code, output = slurm.batch(tmp_path, f"{HVDRUN} -np 4 -H node1:2,node2:2 {RANK}", *TWO_BY_TWO)
    assert (code, said(output)) == (0, FOUR), output


def test_a_rank_that_fails_fails_the_job(slurm: Slurm, tmp_path: Path) -> None:
    script = f"{HVDRUN} -np 4 -H node1:2,node2:2 sh -c 'sleep 1; [ $OMPI_COMM_WORLD_RANK != 3 ] || exit 3; sleep 60'"
    code, output = slurm.batch(tmp_path, script, *TWO_BY_TWO)
    assert code == 3, output
    assert "rank 3 on node2 failed with exit code 3; stopped the other 3 ranks." in output


def test_mpirun_in_a_batch_script(slurm: Slurm, tmp_path: Path) -> None:
    # Its ranks also see Slurm's variables of the daemon that has started them: rank 0 of 1, all of them.
    code, output = slurm.batch(tmp_path, f"{sys.prefix}/bin/mpirun {RANK}", *TWO_BY_TWO, env=OPEN_MPI)
    assert (code, said(output)) == (0, FOUR), output


def test_srun_with_pmix(slurm: Slurm, tmp_path: Path) -> None:
    code, output = slurm.batch(tmp_path, f"srun --mpi=pmix {RANK}", *TWO_BY_TWO, env=OPEN_MPI)
    assert (code, said(output)) == (0, FOUR), output


@pytest.mark.parametrize("pmi", ["none", "pmi2"])
def test_srun_with_a_pmi_that_the_library_lacks_is_an_error_on_every_rank(
    slurm: Slurm, tmp_path: Path, pmi: str
) -> None:
    code, output = slurm.batch(tmp_path, f"srun --mpi={pmi} {RANK}", *TWO_BY_TWO, env=OPEN_MPI)
    assert code != 0
    assert said(output) == []
    for rank in range(4):
        assert f"slurm started 4 tasks, this one as rank {rank} on" in output
    assert output.count("Each rank would train alone. Start the script with `srun --mpi=pmix`") == 4


def test_a_batch_script_by_itself_is_no_rank(slurm: Slurm, tmp_path: Path) -> None:
    code, output = slurm.batch(tmp_path, RANK, *TWO_BY_TWO)
    assert (code, said(output)) == (0, ["rank 0 of 1 on node1, 0 of 1 there"]), output


def test_what_scancel_ends_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    inner = "sh -c \"trap '' TERM; echo up; sleep 300 & sleep 301\""
    script.write_text(f"#!/bin/bash\n{HVDRUN} -np 4 -H node1:2,node2:2 {inner} >{tmp_path}/out\n")
    number = slurm.run("sbatch", "--parsable", "--output=/dev/null", *TWO_BY_TWO, script).stdout.strip()
    slurm.wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("up\n") == 4)
    slurm.run("scancel", number)
    slurm.wait_for(lambda: not slurm.lab.strays())


@pytest.mark.parametrize("options", ["", "--launcher srun", "--launcher ssh"])
def test_hvdrun_needs_neither_hosts_nor_number_in_an_allocation(slurm: Slurm, tmp_path: Path, options: str) -> None:
    code, output = slurm.batch(tmp_path, f"{HVDRUN} {options} {RANK}", *TWO_BY_TWO)
    assert (code, said(output)) == (0, FOUR), output


@pytest.mark.slow
def test_an_agent_that_is_stopped_on_another_host_is_given_up_with_its_job(slurm: Slurm, tmp_path: Path) -> None:
    script = f"{HVDRUN} --launcher srun sh -c '[ $RANK != 3 ] || kill -STOP $PPID'"
    code, output = slurm.batch(tmp_path, script, *TWO_BY_TWO)
    assert code not in (0, None), output
    assert "hvdrun: rank 3 on node2 was lost: its agent has not answered for 35 s" in output
    slurm.wait_for(lambda: not slurm.lab.strays())


def write_script(slurm: Slurm, folder: Path, options: list[str], command: list[str]) -> tuple[str, dict[str, str]]:
    """What hvdkit submit shows for two nodes, without its first line, and the variables to submit it with."""
    shim = folder / "bin" / "hvdrun"  # the checkout need not be installed
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {HVDRUN} "$@"\n')
    shim.chmod(0o755)
    where = environment()
    where["PATH"] = f"{shim.parent}:{where['PATH']}"
    submit = [sys.executable, "-m", "hvdkit", "submit", "--dry-run", "--scheduler", "slurm", "--nodes", "2"]
    submit += ["--tasks-per-node", "1", "--time", "10m", *options, "--", "python", *command]
    shown = slurm.run(*submit, env=where, cwd=folder)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.removeprefix("#!/bin/bash\n"), where


def test_the_script_that_submit_shows_trains(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    digits = [str(ROOT / "examples" / "pytorch_digits.py"), "--epochs", "4", "--min-accuracy", "0.8"]
    body, where = write_script(slurm, tmp_path, [], digits)
    code, output = slurm.batch(tmp_path, body, env=where)
    assert code == 0, output
    assert "2 ranks on 2 hosts (node1: 1, node2: 1)" in output


def test_a_job_that_is_warned_saves_is_requeued_and_goes_on_and_one_that_is_cancelled_is_not(
    slurm: Slurm, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    digits = [str(ROOT / "examples" / "pytorch_resumable_digits.py"), "--epochs", "100000"]
    digits += ["--checkpoints", "checkpoints"]
    body, where = write_script(slurm, tmp_path, ["--requeue", "--signal", "USR1@60"], digits)
    script, output = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(f"#!/bin/bash\n{body}")
    output.touch()
    words = ["sbatch", "--parsable", f"--output={output}", f"--chdir={tmp_path}", str(script)]
    job = slurm.run(*words, env=where).stdout.strip()

    def show() -> str:
        return slurm.run("scontrol", "--oneliner", "show", "job", job).stdout

    slurm.wait_for(lambda: "epoch 2 " in output.read_text(), 90)
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as Slurm does before the time is up
    slurm.wait_for(lambda: "Restarts=1" in show() and "JobState=PENDING" in show())
    assert "saved, not finished: ended with exit code 75" in output.read_text()
    time.sleep(2)  # within a second it would fail with a revoked credential
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    slurm.wait_for(lambda: re.search(r"continuing from (.|\n)*epoch", output.read_text()), 90)
    slurm.run("scancel", job)
    slurm.wait_for(lambda: "JobState=CANCELLED" in show() and not slurm.lab.strays())
    assert "Restarts=1" in show()


@pytest.mark.slow
def test_a_job_that_srun_starts_is_started_again_when_a_rank_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    script = f"{sys.executable} {ROOT}/tests/support/elastic_script.py {tmp_path}/killed"
    options = f"--launcher srun --elastic --elastic-checkpoints {tmp_path}/kept --elastic-save-s 0"
    code, output = slurm.batch(tmp_path, f"{HVDRUN} {options} {script}", "--nodes=2", "--ntasks-per-node=1")
    assert code == 0, output
    assert "ranks that srun has started cannot continue when one dies: hvdrun starts the job again" in output
    assert "starting again with 2 ranks on node1:1, node2:1, from the last checkpoint" in output
    assert output.count("ends at 40 with 2 ranks, alike: True, learned: True") == 2, output
