"""Hosts from the variables of schedulers. Those of Slurm are recorded from a Slurm 22.05."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_job import plan_job
from refused import refused

from hvdkit.errors import HostfileError, LaunchError
from hvdkit.launch.allocations import read_allocation
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.detect.hosts import find_hosts
from hvdkit.launch.hostfiles import FoundHosts, Host


def slurm(nodes: str, tasks: str, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_PROCID": "0",  # the batch script has one, and is no rank
        "SLURM_NODEID": "0",
        **more,
    }


def read(environ: dict[str, str], slots: int | None = None) -> FoundHosts:
    found = read_allocation(environ, slots)
    assert found is not None
    assert found.allocated
    return found


# What sbatch was given -> what its script sees, and the hosts and ranks that are meant.
SLURM_JOBS = {
    "-N2 --ntasks-per-node=2": (
        slurm("hn[1-2]", "2(x2)", SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="2"),
        {"hn1": 2, "hn2": 2},
        4,
    ),
    "-n5": (slurm("hn[1-2]", "4,1", SLURM_NTASKS="5"), {"hn1": 4, "hn2": 1}, 5),
    "-n5 -N3": (slurm("hn[1-3]", "3,1(x2)", SLURM_NTASKS="5"), {"hn1": 3, "hn2": 1, "hn3": 1}, 5),
    "-N2 -n3 --ntasks-per-node=2": (
        slurm("hn[1-2]", "2(x2)", SLURM_NTASKS="3", SLURM_NTASKS_PER_NODE="2"),
        {"hn1": 2, "hn2": 2},
        3,
    ),
    "a part of nid": (
        slurm("nid[001-003,007],login1", "4(x4),2", SLURM_NTASKS="18"),
        {"nid001": 4, "nid002": 4, "nid003": 4, "nid007": 4, "login1": 2},
        18,
    ),
    "-N1 -n1 : -N2 -n3": (
        slurm(
            "hn1",
            "1",
            SLURM_NTASKS="1",
            SLURM_HET_SIZE="2",
            SLURM_JOB_NODELIST_HET_GROUP_0="hn1",
            SLURM_JOB_NODELIST_HET_GROUP_1="hn[2-3]",
            SLURM_TASKS_PER_NODE_HET_GROUP_0="1",
            SLURM_TASKS_PER_NODE_HET_GROUP_1="2,1",
        ),
        {"hn1": 1, "hn2": 2, "hn3": 1},
        None,
    ),
}


@pytest.mark.parametrize("options", SLURM_JOBS)
def test_slurm_says_hosts_and_tasks(options: str) -> None:
    environ, hosts, ranks = SLURM_JOBS[options]
    found = read(environ)
    assert {host.name: host.slots for host in found.hosts} == hosts
    assert (found.ranks, found.notes, found.source) == (ranks, (), "Slurm job 7")


def test_slurm_that_was_not_asked_for_tasks_counts_cpus_and_that_is_said() -> None:
    environ = slurm("hn[1-2]", "4(x2)")  # sbatch -N2 --exclusive
    found = read(environ)
    assert found.hosts == (Host("hn1", 4), Host("hn2", 4))
    assert "one for each CPU" in found.notes[0]
    assert "--ntasks-per-node" in found.notes[0]
    assert read(environ, slots=2).hosts == (Host("hn1", 2), Host("hn2", 2))
    assert read(environ, slots=2).notes == ()


def test_a_step_of_one_task_has_the_hosts_of_the_step() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "hn2", "SLURM_STEP_TASKS_PER_NODE": "1"}
    found = read(slurm("hn[1-2]", "1", SLURM_STEP_NUM_TASKS="1", **step))
    assert (found.hosts, found.source) == ((Host("hn2", 1),), "Slurm job 7, step 0")


def test_hvdrun_under_srun_is_refused_because_each_copy_would_start_all_ranks() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "hn[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    environ = slurm("hn[1-2]", "2,1", SLURM_STEP_NUM_TASKS="3", **step)
    with refused("started-by-srun", names=["3 times"]):
        read(environ)
    # With --pty one of them is the shell in which hvdrun was typed.
    assert read({**environ, "SLURM_PTY_PORT": "4242"}).hosts == (Host("hn1", 2), Host("hn2", 1))


def test_the_step_of_an_interactive_shell_is_the_whole_job() -> None:
    environ = slurm("hn[1-2]", "2(x2)", SLURM_NTASKS="4", SLURM_STEP_ID="4294967290", SLURM_STEP_NUM_TASKS="1")
    assert read(environ).hosts == (Host("hn1", 2), Host("hn2", 2))


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOBID"])
def test_a_jobs_number_without_its_nodes_means_this_machine(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_allocation({name: "7"}) is None
    environ = {"PATH": "/usr/bin:/bin", name: "7", "SLURM_NTASKS": "4"}
    job = plan_job(parse_arguments(["-np", "2", "true"]), environ)
    assert (job.local, job.ranks, job.hosts) == (True, 2, ())
    assert name not in job.environ, "mpirun would look for the nodes too, and end"
    (note,) = job.notes
    assert note.startswith(f"{name} set, but not SLURM_JOB_NODELIST") and "uses this machine" in note
    step = {name: "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = read_allocation({**step, "SLURM_STEP_NUM_TASKS": "1"})
    assert found is not None and found.hosts == (Host("n1", 2),)


def test_slurm_without_a_list_of_tasks_has_the_number_of_each_host_or_all() -> None:
    bare = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert read({**bare, "SLURM_NTASKS_PER_NODE": "3"}).hosts == (Host("n1", 3), Host("n2", 3))
    assert read({**bare, "SLURM_NTASKS": "4"}).hosts == (Host("n1", 2), Host("n2", 2))


@pytest.mark.parametrize(
    ("environ", "code", "names"),
    [
        (slurm("n[1-", "2"), "slurm-hosts", ["job 7: SLURM_JOB_NODELIST: 'n[1-'"]),
        (slurm("-oProxyCommand=x", "2"), "slurm-hosts", ["SLURM_JOB_NODELIST: '-oProxyCommand=x'"]),
        (slurm("n1;reboot", "2"), "slurm-hosts", ["SLURM_JOB_NODELIST: 'n1;reboot'"]),
        (slurm("n[1-3]", "4(x2)"), "slurm-hosts", ["SLURM_TASKS_PER_NODE='4(x2)'", " 2 hosts", "list has 3"]),
        (slurm("n1", "four"), "slurm-hosts", ["SLURM_TASKS_PER_NODE='four'"]),
        (slurm("n[1-2]", "1(x999999999)"), "slurm-hosts", ["SLURM_TASKS_PER_NODE='1(x999999999)'"]),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3"},
            "slurm-hosts",
            ["each host is unknown"],
        ),
        ({"LSB_JOBID": "7"}, "lsf-no-hosts", ["LSF job 7", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE"]),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b"}, "lsf-hosts", ["job 7: LSB_MCPU_HOSTS: 'a 4 b'", "3 words"]),
        ({"PBS_NODEFILE": "/nowhere/nodes"}, "hostfile-invalid", ["/nowhere/nodes: ", "No such file"]),
        ({"PE_HOSTFILE": "/nowhere/nodes"}, "hostfile-invalid", ["/nowhere/nodes: ", "No such file"]),
        ({"HYDRA_HOST_FILE": "/nowhere/nodes"}, "hostfile-invalid", ["/nowhere/nodes: ", "No such file"]),
    ],
)
def test_an_allocation_that_cannot_be_understood_is_an_error_and_never_none(
    environ: dict[str, str], code: str, names: list[str]
) -> None:
    with refused(code, names=names):
        read_allocation(environ)


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "nodes").write_text(text)
    return str(tmp_path / "nodes")


def test_pbs_counts_repeated_lines(tmp_path: Path) -> None:
    found = read({"PBS_JOBID": "12.head", "PBS_NODEFILE": write(tmp_path, "a\na\nb\nb\n")})
    assert (found.hosts, found.source, found.notes) == ((Host("a", 2), Host("b", 2)), "PBS job 12.head", ())


def test_pbs_without_mpiprocs_is_one_rank_a_host_and_that_is_said(tmp_path: Path) -> None:
    environ = {"PBS_JOBID": "12", "PBS_NODEFILE": write(tmp_path, "a\nb\n")}
    found = read(environ)
    assert found.hosts == (Host("a", 1), Host("b", 1))
    assert "mpiprocs=N, or set them here with --slots-per-host" in found.notes[0]
    assert read(environ, slots=4).hosts == (Host("a", 4), Host("b", 4))
    assert read(environ, slots=4).notes == ()


def test_a_wrong_nodefile_is_told_with_its_lines(tmp_path: Path) -> None:
    with refused("hostfile-invalid", names=["nodes:2: 'b slots=2'"], kind=HostfileError):
        read({"PBS_NODEFILE": write(tmp_path, "a\nb slots=2\n")})


@pytest.mark.parametrize(
    "environ",
    [
        {"LSB_MCPU_HOSTS": "a 2 b 1"},
        {"LSB_HOSTS": "a a b"},
        {"LSB_MCPU_HOSTS": "", "LSB_HOSTS": " ", "LSB_DJOB_HOSTFILE": "a\na\nb\n"},
    ],
)
def test_lsf_has_three_ways_to_say_it(environ: dict[str, str], tmp_path: Path) -> None:
    if "LSB_DJOB_HOSTFILE" in environ:
        environ = {**environ, "LSB_DJOB_HOSTFILE": write(tmp_path, environ["LSB_DJOB_HOSTFILE"])}
    found = read({"LSB_JOBID": "7", **environ})
    assert (found.hosts, found.notes) == ((Host("a", 2), Host("b", 1)), ())


@pytest.mark.parametrize("more", [{"CSM_ALLOCATION_ID": "9"}, {}])
def test_lsf_leaves_out_the_host_of_the_batch_script_and_says_so(more: dict[str, str]) -> None:
    found = read({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch5 1 c1 42 c2 42", **more})
    assert found.hosts == (Host("c1", 42), Host("c2", 42))
    assert "batch5 runs the batch script and is left out" in found.notes[0]


@pytest.mark.parametrize("hosts", ["batch5 1", "batch5 1 c1 1", "a 1 b 4", "batch5 4 c1 4"])
def test_lsf_leaves_out_nothing_else(hosts: str) -> None:
    assert len(read({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": hosts}).hosts) == len(hosts.split()) // 2


def test_sge_adds_up_the_queues_of_a_host(tmp_path: Path) -> None:
    path = write(tmp_path, "a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\na 1 gpu.q@a UNDEFINED\n")
    found = read({"PE_HOSTFILE": path, "JOB_ID": "7", "NSLOTS": "7"})
    assert (found.hosts, found.source) == ((Host("a", 5), Host("b", 2)), "SGE job 7")


def test_the_launcher_pod_of_an_mpijob_has_a_default_hostfile(tmp_path: Path) -> None:
    openmpi = {"OMPI_MCA_orte_default_hostfile": write(tmp_path, "p-0.p.ns.svc slots=2\np-1.p.ns.svc slots=2\n")}
    assert read(openmpi).hosts == (Host("p-0.p.ns.svc", 2), Host("p-1.p.ns.svc", 2))
    intel = {"I_MPI_HYDRA_HOST_FILE": write(tmp_path, "p-0.p.ns.svc:2\np-1.p.ns.svc\n"), "I_MPI_PERHOST": "2"}
    assert read(intel).hosts == (Host("p-0.p.ns.svc", 2), Host("p-1.p.ns.svc", 2))
    with refused("slots-variable", names=["I_MPI_PERHOST='some'"]):
        read({**intel, "I_MPI_PERHOST": "some"})


def test_outside_of_any_allocation_there_is_none() -> None:
    assert read_allocation({}) is None
    assert read_allocation({"SLURM_JOB_ID": "", "PBS_NODEFILE": " ", "PATH": "/bin"}) is None


def test_what_is_typed_goes_before_the_allocation(tmp_path: Path) -> None:
    environ = slurm("hn[1-2]", "2(x2)")
    hosts = find_hosts("a:2", None, environ)
    assert hosts is not None
    assert (hosts.hosts, hosts.allocated) == ((Host("a", 2),), False)
    file = find_hosts(None, write(tmp_path, "b slots=3\n"), environ)
    assert file is not None
    assert file.hosts == (Host("b", 3),)


def test_a_nodefile_that_the_scheduler_wrote_is_known_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, "a\nb\n")
    found = find_hosts(None, path, {"PBS_NODEFILE": path})
    assert found is not None
    assert (found.hosts, found.notes) == ((Host("a", 1), Host("b", 1)), ())


def test_hvdrun_in_an_allocation_needs_neither_np_nor_hosts() -> None:
    options = parse_arguments(["true"])
    environ = slurm("localhost", "4", SLURM_NTASKS="3", SLURM_NTASKS_PER_NODE="4", PATH="/bin:/usr/bin")
    job = plan_job(options, environ)
    assert (job.ranks, job.hosts, job.local) == (3, (Host("localhost", 4),), True)
    assert job.notes == ("3 ranks on localhost:4, from Slurm job 7.",)
    options = parse_arguments(["-np", "5", "true"])
    with refused("not-enough-slots", names=["-np 5", "4 slots of localhost:4", "--ntasks-per-node"]):
        plan_job(options, environ)
    options = parse_arguments(["--slots-per-host", "5", "true"])
    assert plan_job(options, environ).ranks == 5


VARIABLES = ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
             "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
             "SLURM_HET_SIZE", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_TASKS_PER_NODE_HET_GROUP_0", "LSB_JOBID",
             "LSB_HOSTS", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "PBS_NODEFILE", "PE_HOSTFILE", "I_MPI_PERHOST",
             "HYDRA_HOST_FILE", "OMPI_MCA_orte_default_hostfile", "SM_HOSTS", "SM_CURRENT_HOST", "SM_NUM_GPUS",
             "NHOSTS", "_CONDOR_PROCNO", "_CONDOR_NPROCS", "CONDOR_CONTACT_FILE", "FLUX_URI", "PBS_NUM_PPN",
             ]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["7", "1", "0", "n[1-2]", "2(x2)", "2,1", "a 2 b 1", "a a b", "4294967290", "/dev/null", "-o", '["n1"]']
    ),
    st.text(alphabet="n12[]-,()x /\x00é٣", max_size=12),
)


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
def test_any_variables_are_an_allocation_or_none_or_a_launch_error(environ: dict[str, str]) -> None:
    try:
        found = read_allocation(environ)
    except LaunchError as error:
        assert str(error)
    else:
        assert found is None or all(host.name.isascii() and not host.name.startswith("-") for host in found.hosts)
