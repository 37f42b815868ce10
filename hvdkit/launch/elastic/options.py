"""Hosts that a discovery script reports, and the policy and the pool of hosts for restarts, from hvdrun's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hvdkit.config import Config, read_config
from hvdkit.errors import LaunchError
from hvdkit.launch.elastic.restart_policy import RestartPolicy, choose_ranks
from hvdkit.launch.hostfiles import FoundHosts
from hvdkit.launch.launchers import job_ssh_options
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.job import Job

if TYPE_CHECKING:
    from hvdkit.launch.elastic.host_pool import HostPool

_UNLIMITED = 10**6
_WAIT_S = 600.0


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


def _number(np: int | str | None) -> int:
    """Return the number of ranks of -np; 0 if it is a word or not given."""
    return np if isinstance(np, int) else 0
