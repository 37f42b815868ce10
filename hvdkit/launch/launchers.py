"""Build the launcher's command line that starts the ranks of a job. Nothing is started here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.environment import select_forwarded
from hvdkit.launch.plan.job import Job, Launch, plan_places
from hvdkit.launch.plan.mpi import WITHOUT_FABRICS, Mpi
from hvdkit.launch.plan.selected_launcher import SelectedLauncher

#: Use only TCP between hosts. Other networks are excluded by name, because Open MPI 4 and 5 have different names for
#: shared memory, which stays in use inside a host.
OPEN_MPI_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct,openib,usnic"}
#: The same for libfabric, under MPICH, Intel MPI and Cray MPICH.
LIBFABRIC_TCP = {"FI_PROVIDER": "tcp"}

_KEEPALIVE = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")


def ssh_options(own: Sequence[str] = (), *, timeout_s: int = 10, keepalive: bool = True) -> tuple[str, ...]:
    """Build the options for ssh: no password prompt, a limit for connecting, and detection of a lost host.

    own: the user's -p and -i. keepalive: ssh ends when its host is lost; by default it waits for hours.
    """
    return ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_s}", *(_KEEPALIVE if keepalive else ()), *own)


def job_ssh_options(job: Job) -> tuple[str, ...]:
    """Build a job's options for ssh.

    In an elastic job mpirun must not detect a lost host, as it would end the job. hvdrun detects it.
    """
    return ssh_options(job.ssh_options, keepalive=not job.survives)


def forwarded_names(job: Job, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables to send to other hosts. variables: those that hvdrun sets."""
    return select_forwarded({**job.environ, **variables}, job.forwarded)


def library_variables(job: Job, mpi: Mpi) -> dict[str, str]:
    """Make mpi4py load the libmpi of this mpirun; by default it prefers the wheel's, and each rank would be alone."""
    chosen = "MPI4PY_LIBMPI" in job.environ or "MPI4PY_MPIABI" in job.environ
    return {"MPI4PY_LIBMPI": mpi.library} if mpi.site and mpi.library and not chosen else {}


def unless_set(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables that the user has set."""
    return {name: value for name, value in variables.items() if name not in environ}


def fill_hosts(job: Job) -> tuple[tuple[str, int], ...]:
    """Fill the hosts in their order; returns (name, ranks) of each host with ranks."""
    return plan_places(job.ranks, job.hosts if not job.local else (Host("localhost", job.ranks),))


def check_supported(job: Job, launcher: str, *what: str) -> None:
    """Raise LaunchError if the job has a feature that the launcher does not accept.

    what: the features to check: "ipv6" for addresses in its list of hosts, "users" for hosts with a user, "ssh" for -p
    and -i.
    """
    addresses = [host.name for host in job.hosts if ":" in host.name]
    if "ipv6" in what and addresses and not job.local:
        raise LaunchError(
            f"{launcher} does not accept an IPv6 address on its command line: {', '.join(addresses)}. "
            "Give the host a name in /etc/hosts or in DNS, and use that name.",
            code="host-is-ipv6",
        )
    logins = [host.login for host in job.hosts if host.user]
    if "users" in what and logins:
        raise LaunchError(
            f"{launcher} does not accept a user name with a host: {', '.join(logins)}. "
            "Write 'User NAME' for that host in ~/.ssh/config, and use the host's name alone.",
            code="host-with-user",
        )
    if "ssh" in what and job.ssh_options:
        raise LaunchError(
            f"{launcher} does not use ssh, so -p and -i have no effect. Remove them, or use --launcher ssh.",
            code="ssh-options-unused",
        )


def build_mpich(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for MPICH, which by default neither binds ranks nor counts slots."""
    mpi = choice.own_mpi
    check_supported(job, mpi.name, "ipv6", "users")
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.tcp:
        variables.update(unless_set({**LIBFABRIC_TCP, "UCX_TLS": "tcp,self,sm"}, job.environ))
    argv = [mpi.mpirun, "-n", str(job.ranks)]
    if job.local:
        argv += ["-hosts", f"localhost:{job.ranks}"]
    else:
        argv += ["-launcher", "ssh"] if choice.ssh else []
        argv += ["-hosts", ",".join(f"{host.name}:{host.slots or 1}" for host in job.hosts)]
        argv += ["-genvlist", ",".join(forwarded_names(job, variables))]
        variables.update(unless_set({"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(job_ssh_options(job))}, job.environ))
    argv += job.binding or ()
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), variables)


def build_intel_mpi(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for Intel MPI: one section per host, because its -hosts accepts no slots."""
    mpi = choice.own_mpi
    check_supported(job, mpi.name, "ipv6", "users")
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.binding is None:
        variables.update(unless_set({"I_MPI_PIN": "0"}, job.environ))
    if job.tcp:
        variables.update(unless_set(LIBFABRIC_TCP, job.environ))
    argv = [mpi.mpirun]
    if not job.local:
        argv += ["-bootstrap", "ssh"] if choice.ssh else []
        argv += ["-genvlist", ",".join(forwarded_names(job, variables))]
        if job.ssh_options:
            extra = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": " ".join(job.ssh_options)}
            variables.update(unless_set(extra, job.environ))
    argv += [*(job.binding or ()), *job.launcher_arguments]
    sections = [["-n", str(count), "-host", name, *job.agent_command] for name, count in fill_hosts(job)]
    for number, section in enumerate(sections):
        argv += [":", *section] if number else section
    return Launch(tuple(argv), variables)


# Ranks survive each other's end, also ranks that other ranks have started (recoverable), and do not wait at their own
# end for hosts without ranks. Every daemon connects to mpirun itself: by default the 65th and later daemons connect
# through others, and would end with them.
_ELASTIC = (
    *("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"),
    *("--prtemca", "state_base_recoverable", "1", "--prtemca", "rml_base_radix", "4096"),
)
_BINDING = ("--map-by", "slot", "--bind-to", "none")


def build_open_mpi(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for Open MPI 4 (ORTE) or 5 and later (PRRTE).

    Ranks are not bound to cores: a rank has threads (data loading, progress), and by default Open MPI binds.
    """
    mpi = choice.own_mpi
    check_supported(job, mpi.name, "ipv6")
    argv = [mpi.mpirun]
    if job.root:
        argv.append("--allow-run-as-root")
    argv += ["-np", str(job.ranks), "--host", ",".join(_format_hosts(job))]
    argv += _BINDING if job.binding is None else job.binding
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.survives:
        argv += _ELASTIC
    argv += _session_parameters(job, mpi)
    if job.tcp:
        variables.update(unless_set(OPEN_MPI_TCP, job.environ))
    if job.local:
        # Shared memory suffices inside one host; the detection of fabrics takes a second at each start.
        variables.update(unless_set(WITHOUT_FABRICS, {**job.environ, **variables}))
    else:
        argv += _daemon_parameters(job, mpi, choice)
        for name in forwarded_names(job, variables):
            argv += ["-x", name]
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), variables)


def _format_hosts(job: Job) -> Iterable[str]:
    if job.local:
        return [f"localhost:{job.ranks}"]  # as many slots as ranks: more ranks than cores are no error here
    return [f"{host.login}:{'auto' if host.slots is None else host.slots}" for host in job.hosts]


def _session_parameters(job: Job, mpi: Mpi) -> list[str]:
    """Give Open MPI 5's mpirun this job's directory for its session.

    By default the session's name in /tmp is mpirun's process number. If an mpirun was killed, its files stay there, and
    a later mpirun with the same number ends with "The PMIx server's listener thread failed to start". If the user has
    set a directory for sessions, that is used; mpirun refuses two.
    """
    own = any("prte_" in word and "tmpdir_base" in word for word in (*job.environ, *job.launcher_arguments))
    if mpi.major < 5 or not job.directory or own or mpi.session_base:
        return []
    return ["--prtemca", "prte_local_tmpdir_base", job.directory]


def _daemon_parameters(job: Job, mpi: Mpi, choice: SelectedLauncher) -> list[str]:
    option, prefix, agent, name = (
        ("--prtemca", "PRTE", "plm_ssh_agent", "ssh") if mpi.major >= 5 else ("--mca", "OMPI", "plm_rsh_agent", "rsh")
    )
    # The scheduler neither starts the daemons nor limits the number of slots.
    over_ssh = [option, "plm", name, option, "ras", "^slurm,tm,lsf,gridengine" if mpi.major < 5 else "^slurm,pbs,lsf"]
    words = over_ssh if choice.ssh else []
    if any(f"{prefix}_MCA_{each}" in job.environ for each in ("plm_ssh_agent", "plm_rsh_agent")):
        return words  # the user's own ssh
    if choice.qrsh:
        return words  # if hvdrun set plm_rsh_agent, Open MPI would not use qrsh
    # Without tree spawn every ssh is started here. Open MPI 5's daemons would get the options cut off at the first "=".
    no_tree = agent.replace("agent", "no_tree_spawn")
    return [*words, option, agent, shlex.join(["ssh", *job_ssh_options(job)]), option, no_tree, "1"]


_PALS = "mpiexec of Cray PALS"


def build_pals(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for PALS, which sends the whole environment and fills the hosts with --ppn ranks each.

    Raises LaunchError for hosts with different numbers of ranks, which it cannot express.
    """
    check_supported(job, _PALS, "ipv6", "users", "ssh")
    places = fill_hosts(job)
    counts = [count for _, count in places]
    if any(count != counts[0] for count in counts[:-1]) or counts[-1] > counts[0]:
        raise LaunchError(
            f"{_PALS} puts the same number of ranks on each host, not "
            f"{', '.join(f'{name}:{count}' for name, count in places)}. Give all hosts the same number of slots, or "
            f"request {min(counts) * len(counts)} ranks.",
            code="ranks-uneven",
        )
    argv = [choice.own_mpi.mpirun, "-n", str(job.ranks)]
    if not job.local:
        argv += ["--ppn", str(counts[0]), "--hosts", ",".join(name for name, _ in places)]
    argv += ["--cpu-bind", "none"] if job.binding is None else job.binding
    tcp = unless_set(LIBFABRIC_TCP, job.environ) if job.tcp else {}
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), {**job.variables, **tcp})


def build_jsrun(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for jsrun: one resource set per host, with all its cores and GPUs, shared by its ranks.

    Raises LaunchError for hosts with different numbers of ranks, which resource sets of one kind cannot express.
    """
    check_supported(job, "jsrun", "users", "ssh")
    counts = [count for _, count in fill_hosts(job)]
    if len(set(counts)) > 1:
        raise LaunchError(
            f"jsrun puts the same number of ranks on each host, not {', '.join(map(str, counts))}. "
            f"Request {min(counts) * len(counts)} ranks, or use another launcher: --launcher mpirun.",
            code="ranks-uneven",
        )
    argv = [choice.program, "--nrs", str(len(counts)), "--rs_per_host", "1", "--tasks_per_rs", str(counts[0])]
    argv += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS"]
    argv += ["--bind", "none"] if job.binding is None else job.binding
    argv += ["--exit_on_error", "1"]
    library = [*(["-tcp"] if job.tcp else []), *job.launcher_arguments]
    if library:  # as in Horovod, --mpi-args are for Spectrum MPI, not for jsrun
        argv += ["--smpiargs", shlex.join(library)]
    return Launch((*argv, *job.agent_command), job.variables)


# The job's defaults for the layout of its steps; the command line gives the whole layout itself.
_LAYOUT = ("SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def build_srun(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for srun. The ranks load the library of the choice's MPI, if it has one."""
    check_supported(job, "srun", "ipv6", "users", "ssh")
    variables = {**job.variables, **(library_variables(job, choice.mpi) if choice.mpi else {})}
    argv = [choice.program, f"--mpi={choice.pmi}", f"--ntasks={job.ranks}", *_layout_options(job)]
    # A failed task ends the step; otherwise srun waits for the others. All variables are sent to the ranks, whatever
    # options sbatch had; and --cpus-per-task is passed, which a step does not inherit from the job.
    argv += ["--kill-on-bad-exit=1", "--export=ALL"]
    if job.environ.get("SLURM_CPUS_PER_TASK"):
        argv.append(f"--cpus-per-task={job.environ['SLURM_CPUS_PER_TASK']}")
    argv += ["--cpu-bind=none"] if job.binding is None else job.binding
    if choice.pmi.startswith("pmix"):
        # Otherwise each rank prints that it cannot use munge.
        variables.update(unless_set({"PMIX_MCA_psec": "native"}, job.environ))
    if job.tcp:
        variables.update(unless_set({**OPEN_MPI_TCP, **LIBFABRIC_TCP}, job.environ))
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), variables, _LAYOUT)


def _layout_options(job: Job) -> list[str]:
    if job.local:
        node = job.environ.get("SLURMD_NODENAME", "")
        return ["--nodes=1", *([f"--nodelist={node}"] if node else [])]
    places = fill_hosts(job)
    names = ",".join(name for name, _ in places)
    if len({count for _, count in places}) == 1:
        return [f"--nodes={len(places)}", f"--ntasks-per-node={places[0][1]}", f"--nodelist={names}"]
    # With an arbitrary distribution the list has a host for each rank.
    each = ",".join(name for name, count in places for _ in range(count))
    return [f"--nodes={len(places)}", "--distribution=arbitrary", f"--nodelist={each}"]


# By launcher, or by the kind of the MPI whose mpirun is the launcher.
_BUILDERS: dict[str, Callable[[Job, SelectedLauncher], Launch]] = {
    "srun": build_srun,
    "jsrun": build_jsrun,
    "open_mpi": build_open_mpi,
    "mpich": build_mpich,
    "intel_mpi": build_intel_mpi,
    "pals": build_pals,
}


def build_launch(job: Job, choice: SelectedLauncher) -> Launch:
    """Build the command line for a launcher. Raises LaunchError for a job that it cannot express."""
    return _BUILDERS[choice.launcher if choice.launcher in _BUILDERS else choice.own_mpi.kind](job, choice)
