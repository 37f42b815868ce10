"""What starts the ranks: how it is chosen, and its command line against recorded ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from hvdkit.launch.allocations.schedulers import find_scheduler
from hvdkit.launch.detect.launchers import detect_launchers, parse_pmi_list
from hvdkit.launch.detect.mpi import find_mpi
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.plan.environment import withhold
from hvdkit.launch.plan.job import Job, format_shell_line
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.plan.selected_launcher import LAUNCHERS, SelectedLauncher, select_launcher
from hvdkit.launch.plan.selected_launcher import LauncherEnvironment as Environment

GOLDEN = Path(__file__).parents[1] / "data" / "golden"

OPEN_MPI_5 = Mpi("open_mpi", "Open MPI", "5.0.11", "/venv/bin/mpirun")
OPEN_MPI_4 = Mpi("open_mpi", "Open MPI", "4.1.6", "/opt/ompi/bin/mpirun", True, "/opt/ompi/lib/libmpi.so")
MPICH = Mpi("mpich", "MPICH", "5.0.2", "/opt/mpich/bin/mpirun", True, "/opt/mpich/lib/libmpi.so")
INTEL = Mpi("intel_mpi", "Intel MPI", "2021.14", "/opt/intel/bin/mpirun", True, "/opt/intel/lib/libmpi.so")
PALS = Mpi("pals", "Cray PALS", "1.3.4", "/opt/cray/pals/bin/mpiexec", True)

EVEN = (Host("node1", 4), Host("node2", 4))
UNEVEN = (Host("node1", 4), Host("node2", 2))
ENVIRON = {"PATH": "/usr/bin", "HOME": "/root", "DATA": "/data"}


def job(*, hosts: tuple[Host, ...] = EVEN, ranks: int = 8, **more: Any) -> Job:
    return Job(
        command=("python", "train.py", "--name", "two words"),
        ranks=ranks,
        hosts=hosts,
        local=not hosts,
        environ=ENVIRON | more.pop("environ", {}),
        variables={"PYTHONUNBUFFERED": "1"},
        python="/venv/bin/python",
        agent="/venv/hvdkit/launch/agent",
        **more,
    )


def srun(mpi: Mpi | None, pmi: str) -> SelectedLauncher:
    return SelectedLauncher("srun", "", "/usr/bin/srun", mpi, pmi)


JSRUN = SelectedLauncher("jsrun", "", "/opt/ibm/jsrun")
WITH_CORES = {"SLURM_CPUS_PER_TASK": "7"}
OWN: dict[str, Any] = {
    "ssh_options": ("-p", "2222", "-i", "/home/me/key"),
    "launcher_arguments": ("--report-bindings",),
    "binding": ("--rankfile", "ranks"),
    "tcp": True,
}

LAUNCHES = {
    "srun_pmix": build_launch(job(environ=WITH_CORES), srun(OPEN_MPI_5, "pmix")),
    "srun_pmix_uneven": build_launch(job(hosts=UNEVEN, ranks=5), srun(OPEN_MPI_4, "pmix")),
    "srun_pmi2": build_launch(job(), srun(MPICH, "pmi2")),
    "srun_cray": build_launch(job(), srun(None, "cray_shasta")),
    "srun_local": build_launch(job(hosts=(), ranks=3, environ={"SLURMD_NODENAME": "node2"}), srun(OPEN_MPI_5, "pmix")),
    "pals": build_launch(job(ranks=7), SelectedLauncher("mpiexec", "", mpi=PALS)),
    "pals_local": build_launch(job(hosts=(), ranks=4), SelectedLauncher("mpirun", "", mpi=PALS)),
    "jsrun": build_launch(job(), JSRUN),
    "jsrun_own": build_launch(job(**{**OWN, "ssh_options": (), "binding": ("--bind", "packed:7")}), JSRUN),
    "openmpi5_ssh": build_launch(job(), SelectedLauncher("ssh", "", mpi=OPEN_MPI_5)),
    "openmpi4_ssh": build_launch(job(), SelectedLauncher("ssh", "", mpi=OPEN_MPI_4)),
    "mpich_ssh": build_launch(job(), SelectedLauncher("ssh", "", mpi=MPICH)),
    "intel_ssh": build_launch(job(), SelectedLauncher("ssh", "", mpi=INTEL)),
    "mpich_mpiexec": build_launch(job(), SelectedLauncher("mpiexec", "", "/opt/mpich/bin/mpiexec", MPICH)),
    "openmpi5_own": build_launch(job(**OWN), SelectedLauncher("mpirun", "", mpi=OPEN_MPI_5)),
    "mpich_own": build_launch(job(**OWN), SelectedLauncher("mpirun", "", mpi=MPICH)),
    "intel_own": build_launch(job(**OWN), SelectedLauncher("mpirun", "", mpi=INTEL)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_command_line_is_the_recorded_one(name: str) -> None:
    line = format_shell_line(LAUNCHES[name]) + "\n"
    path = GOLDEN / f"starter_{name}.txt"
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        path.write_text(line)
    assert line == path.read_text(), "if this is meant: HVDKIT_TEST_RECORD=1 pytest tests/unit/test_launchers.py"


KEYS = {"AWS_SECRET_ACCESS_KEY": "1", "HF_TOKEN": "2", "PATH_TOKEN": "3"}
CHOICES = {
    "srun": srun(OPEN_MPI_5, "pmix"),
    "jsrun": JSRUN,
    "pals": SelectedLauncher("mpiexec", "", mpi=PALS),
    **{mpi.kind + mpi.version: SelectedLauncher("ssh", "", mpi=mpi) for mpi in (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL)},
}


@pytest.mark.parametrize("name", CHOICES)
def test_variables_that_are_kept_from_the_ranks_are_in_no_launch(name: str) -> None:
    """The command line, and the environment that it is run with, are as if they had never been set."""
    kept = withhold({**ENVIRON, **KEYS}, ["AWS_*", "*_TOKEN"])
    assert kept == ENVIRON
    everything, nothing = job(environ=KEYS), replace(job(), environ=kept)
    assert build_launch(nothing, CHOICES[name]) == build_launch(job(), CHOICES[name])
    if name not in ("srun", "jsrun", "pals"):  # which send the whole environment
        forwarded = " ".join(build_launch(everything, CHOICES[name]).argv)
        assert all(key in forwarded for key in KEYS)


def test_what_ranks_need_is_never_kept_from_them() -> None:
    needed = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "HVDKIT_ELASTIC": "1", "HYDRA_LAUNCHER": "ssh", "HOME": "/h"}
    needed |= {"PYTHONPATH": "/x", "SLURM_JOB_ID": "1", "OMPI_MCA_pml": "ob1", "SSH_AUTH_SOCK": "/tmp/s"}
    assert withhold({**needed, "X": "1"}, ["*"]) == needed
    for name in needed:
        with refused("variable-required", names=[f"--no-forward-env {name}: {name} "]):
            withhold(needed, [name])
    with refused("variable-required", names=["--no-forward-env SSH_*: SSH_AUTH_SOCK "]):
        withhold({**needed, "X": "1"}, ["X", "SSH_*"])


def test_what_a_starter_cannot_express_is_refused() -> None:
    with refused("ranks-uneven", names=["PALS", "node1:2, node2:4"]):
        build_launch(
            job(hosts=(Host("node1", 2), Host("node2", 4)), ranks=6), SelectedLauncher("mpiexec", "", mpi=PALS)
        )
    with refused("ranks-uneven", names=["jsrun", "4, 2", "4 ranks"]):
        build_launch(job(hosts=UNEVEN, ranks=6), JSRUN)
    for choice in (srun(OPEN_MPI_5, "pmix"), JSRUN, SelectedLauncher("mpiexec", "", mpi=PALS)):
        with refused("host-with-user", names=["bob@node1"]):
            build_launch(job(hosts=(Host("node1", 8, user="bob"),)), choice)
        with refused("ssh-options-unused", names=["-p", "-i"]):
            build_launch(job(ssh_options=("-p", "22")), choice)


def test_what_the_user_set_is_not_overridden() -> None:
    launch = build_launch(
        job(environ={"PMIX_MCA_psec": "munge", "OMPI_MCA_pml": "ucx"}, tcp=True), srun(OPEN_MPI_5, "pmix")
    )
    assert not {"PMIX_MCA_psec", "OMPI_MCA_pml"} & launch.variables.keys()


SLURM = Environment(
    scheduler="slurm", programs={"srun": "/usr/bin/srun"}, no_mpi="no mpirun", pmi=("none", "pmi2", "pmix")
)
LSF = Environment(scheduler="lsf", programs={"jsrun": "/opt/ibm/jsrun"}, mpi=OPEN_MPI_4)


@pytest.mark.parametrize(
    ("facts", "wish", "launcher", "reason"),
    [
        (
            Environment(local=True, mpi=OPEN_MPI_5),
            "",
            "mpirun",
            "Open MPI's mpirun: all ranks are on this machine",
        ),
        (Environment(mpi=MPICH, named_hosts=True), "", "mpirun", "MPICH's mpirun, over ssh"),
        (replace(SLURM, mpi=OPEN_MPI_5), "", "mpirun", "it starts its daemons through srun"),
        (
            Environment(scheduler="pbs", mpi=PALS),
            "",
            "mpirun",
            "Cray PALS's mpiexec: it is this site's launcher",
        ),
        (
            replace(SLURM, cray=True, pmi=("pmi2", "cray_shasta")),
            "",
            "srun",
            "there is no mpirun; ranks connect by cray_shasta",
        ),
        (replace(SLURM, pmi=("none", "pmi2")), "", "srun", "ranks connect by pmi2"),
        (replace(SLURM, mpi=OPEN_MPI_5), "srun", "srun", "--launcher srun; ranks connect by pmix"),
        (replace(SLURM, mpi=MPICH), "srun", "srun", "ranks connect by pmi2"),
        (replace(SLURM, pmi_wish="pmix_v4"), "", "srun", "ranks connect by pmix_v4"),
        (replace(SLURM, mpi=OPEN_MPI_5, pmi_wish="pmi2"), "srun", "srun", "ranks connect by pmix"),
        (replace(SLURM, mpi=OPEN_MPI_5), "ssh", "ssh", "--launcher ssh"),
        (LSF, "", "jsrun", "this is an LSF job, and the site has jsrun"),
        (LSF, "mpirun", "mpirun", "--launcher mpirun"),
        (replace(LSF, named_hosts=True), "", "mpirun", "through LSF"),
        (Environment(scheduler="pbs", mpi=PALS), "mpiexec", "mpiexec", "--launcher mpiexec"),
    ],
)
def test_the_choice_and_its_reason(facts: Environment, wish: str, launcher: str, reason: str) -> None:
    choice = select_launcher(facts, wish)
    assert choice.launcher == launcher
    assert reason in choice.reason
    assert not choice.reason.endswith(".")


@pytest.mark.parametrize(
    ("facts", "wish", "code", "names"),
    [
        (Environment(no_mpi="no mpirun here"), "", "mpi-missing", ["no mpirun here"]),
        (Environment(no_mpi="no mpirun here"), "mpiexec", "mpi-missing", ["no mpirun here"]),
        (Environment(mpi=MPICH), "srun", "srun-missing", ["--launcher ssh"]),
        (replace(SLURM, mpi=MPICH, scheduler=""), "srun", "not-a-slurm-job", ["hvdkit submit"]),
        (replace(SLURM, mpi=OPEN_MPI_5, pmi=("none", "pmi2")), "srun", "srun-plugin-missing", ["none, pmi2", "pmix"]),
        (replace(SLURM, mpi=MPICH, pmi=()), "srun", "srun-plugin-missing", ["no PMI", "MPICH 5.0.2", "pmi2"]),
        (replace(SLURM, cray=True), "", "srun-plugin-missing", ["Cray MPICH", "cray_shasta"]),
        (replace(SLURM, mpi=INTEL), "srun", "srun-pmi-library", ["Intel MPI", "I_MPI_PMI_LIBRARY"]),
        (replace(SLURM, pmi_wish="none"), "srun", "srun-plugin-unknown", ["none, pmi2, pmix", "SLURM_MPI_TYPE"]),
        (SLURM, "srun", "srun-plugin-unknown", ["none, pmi2, pmix", "SLURM_MPI_TYPE"]),
        (Environment(mpi=MPICH), "jsrun", "jsrun-missing", ["--launcher jsrun"]),
        (replace(LSF, scheduler=""), "jsrun", "not-an-lsf-job", ["bsub"]),
        (Environment(mpi=PALS, scheduler="pbs"), "ssh", "launcher-not-of-pals", ["--launcher ssh", "first on PATH"]),
        (Environment(mpi=PALS, scheduler="pbs"), "mpirun", "launcher-not-of-pals", ["--launcher mpiexec"]),
    ],
)
def test_an_impossible_wish_is_an_error_with_its_cure(
    facts: Environment, wish: str, code: str, names: list[str]
) -> None:
    with refused(code, names=names):
        select_launcher(facts, wish)


def test_every_wish_works_somewhere() -> None:
    everything = replace(SLURM, mpi=MPICH, programs={name: f"/bin/{name}" for name in LAUNCHERS})
    for wish in LAUNCHERS:
        facts = replace(everything, scheduler="lsf") if wish == "jsrun" else everything
        assert select_launcher(facts, wish).launcher == wish


LISTS = {
    "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n": ("none", "pmi2", "openmpi"),
    "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix versions available: pmix_v4": (
        *("cray_shasta", "none", "pmi2", "pmix", "pmix_v4"),
    ),
    "srun: fatal: Could not establish a configuration source": (),
}


def test_the_list_of_srun_is_read() -> None:
    assert {text: parse_pmi_list(text) for text in LISTS} == LISTS


def test_a_job_is_known_by_its_schedulers_own_variable() -> None:
    assert find_scheduler({"SLURM_JOB_ID": "1"}) == "slurm"
    assert find_scheduler({"SLURM_JOB_ID": "", "PBS_JOBID": "1.x"}) == "pbs"
    assert find_scheduler({"LSB_JOBID": "1", "SLURM_CONF": "/etc"}) == "lsf"
    assert find_scheduler({"SLURM_CONF": "/etc"}) == ""


def program(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    (folder / name).chmod(0o755)
    return folder


def test_facts_are_gathered_and_srun_is_asked_only_where_it_may_be_needed(tmp_path: Path) -> None:
    program(tmp_path / "bin", "mpirun", "mpirun (Open MPI) 4.1.4")
    program(tmp_path / "bin", "mpiexec", "mpiexec (OpenRTE) 4.1.4")
    program(tmp_path / "bin", "srun", "MPI plugin types are...\n\tnone\n\tpmix")
    environ = {"PATH": f"{tmp_path}/bin:/bin", "SLURM_JOB_ID": "7", "CRAY_MPICH_DIR": "/opt"}
    facts = detect_launchers(environ, str(tmp_path / "venv"), local=False, named_hosts=False)
    assert facts.mpi is not None
    assert (facts.mpi.version, facts.scheduler, facts.pmi, facts.cray) == ("4.1.4", "slurm", (), True)
    assert facts.programs["mpiexec"] == str(tmp_path / "bin" / "mpiexec")
    assert detect_launchers(environ, str(tmp_path), local=False, named_hosts=False, wish="srun").pmi == ("none", "pmix")
    (tmp_path / "bin" / "mpirun").unlink()
    program(tmp_path / "bin", "mpiexec", "Megaflop Runner 3")
    facts = detect_launchers(environ, str(tmp_path / "venv"), local=False, named_hosts=False)
    assert (facts.mpi, facts.pmi) == (None, ("none", "pmix"))
    assert "Megaflop Runner 3" in facts.no_mpi


@pytest.mark.parametrize("version", ["4.1.4", "5.0.11"])
def test_in_a_job_of_grid_engine_open_mpi_starts_its_daemons_with_qrsh(tmp_path: Path, version: str) -> None:
    program(tmp_path / "bin", "mpirun", f"mpirun (Open MPI) {version}")
    qrsh = program(tmp_path / "sge" / "bin" / "lx-amd64", "qrsh", "") / "qrsh"
    environ = {"PATH": f"{tmp_path}/bin:/bin", "SGE_ROOT": f"{tmp_path}/sge", "ARC": "lx-amd64", "JOB_ID": "7"}
    environ["PE_HOSTFILE"] = "/spool/pe_hostfile"

    def started(wish: str = "", **more: Any) -> tuple[str, bool]:
        own_ssh = "ssh_options" in more
        facts = detect_launchers(environ, str(tmp_path), local=False, named_hosts=False, wish=wish, own_ssh=own_ssh)
        choice = select_launcher(facts, wish)
        return choice.reason, "BatchMode=yes" in " ".join(build_launch(job(**more), choice).argv)

    assert started() == (f"Open MPI's mpirun: it starts its daemons through {qrsh}", False)
    assert started("mpirun") == ("--launcher mpirun", False)
    assert started("ssh") == ("--launcher ssh", True)
    reason = "it starts its daemons over ssh, as -p or -i was given"
    assert started(ssh_options=("-p", "2222")) == (f"Open MPI's mpirun: {reason}", True)
    qrsh.rename(tmp_path / "bin" / "qrsh")
    assert started() == (f"Open MPI's mpirun: it starts its daemons through {tmp_path}/bin/qrsh", False)
    (tmp_path / "bin" / "qrsh").unlink()
    reason = "it starts its daemons over ssh, as there is no qrsh on PATH or in $SGE_ROOT/bin/$ARC"
    assert started() == (f"Open MPI's mpirun: {reason}", True)


def test_crays_mpiexec_is_known_by_what_it_says_or_where_it_lies(tmp_path: Path) -> None:
    named, placed = tmp_path / "a" / "bin", tmp_path / "pals" / "1.3.4" / "bin"
    for folder, says in ((named, "PALS version 1.2.12"), (placed, "mpiexec version 1.3.4")):
        program(folder, "mpiexec", says)
        found = find_mpi({"PATH": f"{folder}:/usr/bin:/bin"}, str(tmp_path))
        assert (found.kind, found.version) == ("pals", says.split()[-1])
