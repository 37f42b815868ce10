"""hvdrun's options of jobs that go on when ranks die: what ranks are told, and what hvdrun does when a job is lost."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.config import Config, read_config
from hvdkit.errors import LaunchError
from hvdkit.launch.blacklist import Blacklist
from hvdkit.launch.choose import Choice
from hvdkit.launch.hosts import FoundHosts
from hvdkit.launch.job import Job
from hvdkit.launch.numbers import count_or_none, seconds, seconds_or_none
from hvdkit.launch.restarting import Terms, choose_ranks
from hvdkit.launch.room import count_slots, describe_slots, wait_for_room
from hvdkit.launch.starters.common import ssh_options

if TYPE_CHECKING:
    from hvdkit.launch.available import Available

_UNLIMITED = 10**6
_WAIT_S = 600.0
_SHORTEST_S, _LONGEST_S = 1, 3600


def add_elastic_flags(parser: argparse.ArgumentParser) -> None:
    """Add those that are no settings of the ranks; horovodrun's, under its names."""
    group = parser.add_argument_group("hosts that come and go", "Each implies --elastic, see there and --min-np.")
    add = group.add_argument
    add(
        "--host-discovery-script",
        metavar="SCRIPT",
        help="prints which hosts there are now, one host:slots a line; asked at each start, and every second meanwhile",
    )
    add(
        "--blacklist-cooldown-range",
        "--blacklist-cooldown",
        type=seconds,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds for which a host that was lost is left out, longer each time; for good if left out",
    )
    add(
        "--reset-limit",
        type=count_or_none,
        metavar="N",
        help="times that the job is started again, any number if left out",
    )
    add(
        "--elastic-timeout",
        type=seconds_or_none,
        metavar="SECONDS",
        help="how long to wait for --min-np slots, 600 if left out",
    )


def plan_elastic(options: argparse.Namespace, config: Config, ranks: int) -> dict[str, str]:
    """What ranks are told of a job that goes on when some die; {} for another one. Raises LaunchError."""
    given = (options.host_discovery_script, options.blacklist_cooldown_range, options.reset_limit)
    asked = any(one is not None for one in (*given, options.elastic_timeout))
    if not (config.elastic or config.elastic_restarts or config.min_np or config.max_np or asked):
        return {}
    if config.min_np > ranks:
        raise LaunchError(f"--min-np {config.min_np} is more than the {ranks} ranks to start with (-np).")
    if config.max_np and config.max_np < ranks:
        raise LaunchError(f"--max-np {config.max_np} is less than the {ranks} ranks to start with (-np).")
    if options.blacklist_cooldown_range is not None:
        shortest, longest = options.blacklist_cooldown_range
        if not _SHORTEST_S <= shortest <= longest <= _LONGEST_S:
            raise LaunchError(
                f"--blacklist-cooldown-range {shortest:g} {longest:g}: give the shortest and the longest time, from "
                f"{_SHORTEST_S} to {_LONGEST_S} seconds."
            )
    return {"HVDKIT_ELASTIC": "1", "HVDKIT_MAX_NP": str(config.max_np or ranks)}


def describe_restarts(job: Job, choice: Choice) -> str:
    """Why hvdrun is to start the job again when a rank dies, as a sentence; "" if it is not, or ranks go on."""
    if not job.elastic:
        return ""
    mpi, config = choice.mpi, read_config({**job.environ, **job.variables})
    if config.elastic_restarts:
        why = "when a rank dies"
    elif choice.starter in ("srun", "jsrun"):
        why = f"ranks that {choice.starter} has started cannot go on without a dead one"
    elif mpi is None or mpi.kind != "open_mpi" or mpi.major < 5:
        through = f"this MPI ({mpi.name} {mpi.version})" if mpi is not None else "this MPI"
        why = f"{through} cannot go on without a dead rank"
    else:
        return ""
    where = (
        "" if config.elastic_checkpoints else " (of hvd.checkpoint; for elastic.run say --elastic-checkpoints FOLDER)"
    )
    if config.elastic_restarts:
        return f"{why} hvdrun starts the job again from its last checkpoint{where}."
    return f"{why}: hvdrun starts the job again from its last checkpoint instead{where}."


def restart_instead(job: Job, why: str = "") -> Job:
    """The same job, whose ranks do not try to go on without each other. why: for the user."""
    variables = {**job.variables, "HVDKIT_ELASTIC_RESTARTS": "1"}
    return replace(job, elastic=False, variables=variables, notes=(*job.notes, *([why] if why else [])))


def find_discovered(options: argparse.Namespace, environ: Mapping[str, str]) -> FoundHosts:
    """The hosts that the script knows, once there are as many as are needed, and the ranks to start with on them.

    Raises LaunchError if the script is of no use, or there are too few for too long.
    """
    if options.hosts is not None or options.hostfile is not None:
        raise LaunchError("--host-discovery-script says where to run, and so does -H or --hostfile. Leave one out.")
    import asyncio

    from hvdkit.launch.discovery import Discovery

    discovery = Discovery(options.host_discovery_script, options.slots_per_host, environ)
    config = read_config({**environ, **options.settings})
    terms = _plan_terms(options, config, options.ranks or config.min_np or 1, _UNLIMITED)
    found = asyncio.run(
        wait_for_room(
            discovery.look,
            lambda hosts: choose_ranks(count_slots(hosts), terms),
            wait_s=terms.wait_s,
            may_grow=lambda: True,
            tell=lambda hosts: _say(f"{describe_slots(hosts, terms.least)}: waiting, up to {terms.wait_s:g} s."),
        )
    )
    if found is None:
        raise LaunchError(
            f"--host-discovery-script {options.host_discovery_script}: there were not as many as {terms.least} slots "
            f"within {terms.wait_s:g} s (--elastic-timeout)."
        )
    hosts, ranks = found
    return FoundHosts(hosts, f"--host-discovery-script {options.host_discovery_script}", ranks=ranks)


def _plan_terms(options: argparse.Namespace, config: Config, least: int, most: int) -> Terms:
    if options.host_discovery_script is not None:
        most = max(least, config.max_np or options.ranks or _UNLIMITED)
    wait_s = _WAIT_S if options.elastic_timeout is None else options.elastic_timeout
    return Terms(least, most, limit=options.reset_limit, wait_s=wait_s)


def plan_terms(options: argparse.Namespace, job: Job) -> Terms:
    """On which terms a job is started again."""
    config = read_config({**job.environ, **job.variables})
    terms = _plan_terms(options, config, max(1, config.min_np), job.ranks)
    varies = options.host_discovery_script is not None
    return replace(terms, outlives=job.elastic, saves=bool(config.elastic_checkpoints), varies=varies)


def plan_available(
    options: argparse.Namespace, environ: Mapping[str, str], job: Job, ssh: bool, tell: Callable[[str], None]
) -> Available:
    """Where it is started again. ssh: ranks are started over it. tell: to the user."""
    from hvdkit.launch.available import Available, ask_over_ssh
    from hvdkit.launch.discovery import Discovery

    script, cooldown = options.host_discovery_script, options.blacklist_cooldown_range
    return Available(
        job.hosts,
        tell,
        look=Discovery(script, options.slots_per_host, environ).look if script is not None else None,
        answers=ask_over_ssh(ssh_options(job)) if ssh else None,
        lost=Blacklist(None if cooldown is None else (cooldown[0], cooldown[1])),
    )


def starts_over_ssh(choice: Choice, scheduler: str, environ: Mapping[str, str]) -> bool:
    """Are ranks of other hosts started with the ssh on PATH, as far as is known? scheduler: whose job this is in."""
    own = [name for name in environ if re.fullmatch(r"(PRTE|OMPI)_MCA_plm_(ssh|rsh)_agent|HYDRA_LAUNCHER.*", name)]
    by_mpi = choice.starter in ("mpirun", "mpiexec") and choice.mpi is not None and choice.mpi.kind != "pals"
    return not own and (choice.starter == "ssh" or (by_mpi and not scheduler))


def _say(what: str) -> None:
    print(f"hvdrun: {what}", file=sys.stderr)
