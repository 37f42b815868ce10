"""hvdrun's options of elastic jobs: the ranks' settings, and the policy for restarts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hvdkit.config import Config, read_config
from hvdkit.errors import LaunchError
from hvdkit.launch.elastic.restart_policy import RestartPolicy, choose_ranks
from hvdkit.launch.hostfiles import FoundHosts
from hvdkit.launch.launchers import job_ssh_options
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.launcher_choice import LauncherChoice

if TYPE_CHECKING:
    from hvdkit.launch.elastic.host_pool import HostPool

_UNLIMITED = 10**6
_WAIT_S = 600.0
_SHORTEST_S, _LONGEST_S = 1, 3600


def plan_elastic(options: LaunchOptions, config: Config, ranks: int) -> dict[str, str]:
    """Plan the settings of the ranks of an elastic job; {} for another job. Raises LaunchError for contradictions."""
    given = (options.host_discovery_script, options.blacklist_cooldown_range, options.reset_limit)
    asked = any(one is not None for one in (*given, options.elastic_timeout))
    if not (config.elastic or config.elastic_restarts or config.min_np or config.max_np or asked):
        return {}
    if config.min_np > ranks:
        raise LaunchError(
            f"--min-np {config.min_np} exceeds the {ranks} ranks of the job (-np). Lower it, or start more ranks.",
            code="min-np-too-large",
        )
    if config.max_np and config.max_np < ranks:
        raise LaunchError(
            f"--max-np {config.max_np} is less than the {ranks} ranks of the job (-np). Raise it, or start fewer "
            "ranks.",
            code="max-np-too-small",
        )
    if options.blacklist_cooldown_range is not None:
        shortest, longest = options.blacklist_cooldown_range
        if not _SHORTEST_S <= shortest <= longest <= _LONGEST_S:
            raise LaunchError(
                f"--blacklist-cooldown-range {shortest:g} {longest:g} is not a range of seconds. Give the shortest "
                f"time, then the longest, from {_SHORTEST_S} to {_LONGEST_S}.",
                code="cooldown-range",
            )
    return {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": str(config.max_np or ranks)}


def describe_restarts(job: Job, choice: LauncherChoice) -> str:
    """Describe why hvdrun restarts the job when a rank dies; "" if ranks continue, or hvdrun does not restart it."""
    if job.elasticity is Elasticity.OFF:
        return ""
    mpi, config = choice.mpi, job.config
    if job.elasticity is Elasticity.RESTART:
        why = "when a rank dies"
    elif choice.launcher in ("srun", "jsrun"):
        why = f"ranks that {choice.launcher} has started cannot continue when one dies"
    elif mpi is None or mpi.kind != "open_mpi" or mpi.major < 5:
        through = f"this MPI ({mpi.name} {mpi.version})" if mpi is not None else "this MPI"
        why = f"with {through} ranks cannot continue when one dies"
    else:
        return ""
    where = (
        ""
        if config.elastic_checkpoints
        else " (which hvd.checkpoint saves; for elastic.run add --elastic-checkpoints DIR)"
    )
    if job.elasticity is Elasticity.RESTART:
        return f"{why} hvdrun starts the job again from its last checkpoint{where}."
    return f"{why}: hvdrun starts the job again from its last checkpoint instead{where}."


def find_discovered(options: LaunchOptions, environ: Mapping[str, str], note: Callable[[str], None]) -> FoundHosts:
    """Find the hosts that the script reports, and the number of ranks on them; waits until the slots are enough.

    note: writes a line while it waits.
    Raises LaunchError if the script fails, or the slots are too few for too long.
    """
    script = options.host_discovery_script
    assert script is not None
    if options.hosts is not None or options.hostfile is not None:
        raise LaunchError(
            "--host-discovery-script and -H or --hostfile both give the hosts; remove one of them.",
            code="hosts-given-twice",
        )
    import asyncio  # slow to load, like host_pool, and hvdrun --help imports this module

    from hvdkit.launch.elastic.host_pool import Discovery, count_slots, wait_for_slots

    discovery = Discovery(script, options.slots_per_host, environ)
    config = read_config({**environ, **options.settings})
    policy = plan_restart_policy(options, config, _number(options.np) or config.min_np or 1, _UNLIMITED)
    found = asyncio.run(
        wait_for_slots(
            discovery.find_hosts,
            lambda hosts: choose_ranks(count_slots(hosts), policy),
            min_ranks=policy.min_ranks,
            wait_s=policy.wait_s,
            say=note,
            needed_by="-np" if options.np else "--min-np",
        )
    )
    if found is None:
        raise LaunchError(
            f"--host-discovery-script {options.host_discovery_script}: it did not report "
            f"{policy.min_ranks} slot{'s' * (policy.min_ranks != 1)} within {policy.wait_s:g} s. "
            "Check its output, or raise --elastic-timeout.",
            code="discovery-too-few-slots",
        )
    hosts, ranks = found
    return FoundHosts(hosts, f"--host-discovery-script {options.host_discovery_script}", ranks=ranks)


def plan_restart_policy(
    options: LaunchOptions, config: Config, min_ranks: int, max_ranks: int, *, ranks_survive: bool = False
) -> RestartPolicy:
    """Plan the policy for restarts.

    options, config: of the job.
    min_ranks: the least number of ranks.
    max_ranks: the greatest number of ranks if no script finds hosts.
    ranks_survive: ranks continue when others die.
    """
    discovers = options.host_discovery_script is not None
    if discovers:
        max_ranks = max(min_ranks, config.max_np or _number(options.np) or _UNLIMITED)
    return RestartPolicy(
        min_ranks,
        max_ranks,
        max_restarts=options.reset_limit,
        wait_s=_WAIT_S if options.elastic_timeout is None else options.elastic_timeout,
        ranks_survive=ranks_survive,
        checkpoints=config.elastic_checkpoints,
        discovers=discovers,
    )


def plan_host_pool(
    options: LaunchOptions, environ: Mapping[str, str], job: Job, ssh: bool, say: Callable[[str], None]
) -> HostPool:
    """Plan the pool of hosts for restarts.

    options: of the job.
    environ: hvdrun's variables.
    job: the plan of the job.
    ssh: ranks are started over ssh.
    say: prints a line.
    """
    from hvdkit.launch.elastic.host_pool import Blacklist, Discovery, HostPool, probe_over_ssh

    script, cooldown = options.host_discovery_script, options.blacklist_cooldown_range
    return HostPool(
        job.hosts,
        say,
        discover=Discovery(script, options.slots_per_host, environ).find_hosts if script is not None else None,
        answers=probe_over_ssh(job_ssh_options(job)) if ssh else None,
        lost=Blacklist(None if cooldown is None else (cooldown[0], cooldown[1])),
    )


def starts_over_ssh(choice: LauncherChoice, scheduler: str, environ: Mapping[str, str]) -> bool:
    """Are ranks on other hosts started with the ssh on PATH? scheduler: of the allocation; "" for none."""
    own = [name for name in environ if re.fullmatch(r"(PRTE|OMPI)_MCA_plm_(ssh|rsh)_agent|HYDRA_LAUNCHER.*", name)]
    by_mpi = choice.launcher in ("mpirun", "mpiexec") and choice.mpi is not None and choice.mpi.kind != "pals"
    return not own and (choice.launcher == "ssh" or (by_mpi and not scheduler))


def _number(np: int | str | None) -> int:
    """Return the number of ranks of -np; 0 if it is a word or not given."""
    return np if isinstance(np, int) else 0
