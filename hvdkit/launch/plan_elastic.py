"""Plan elastic jobs: the settings of their ranks, whether hvdrun restarts them, and whether it uses ssh."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdkit.config import Config
from hvdkit.errors import LaunchError
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.selected_launcher import SelectedLauncher

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


def describe_restarts(job: Job, choice: SelectedLauncher) -> str:
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


def starts_over_ssh(choice: SelectedLauncher, scheduler: str, environ: Mapping[str, str]) -> bool:
    """Are ranks on other hosts started with the ssh on PATH? scheduler: of the allocation; "" for none."""
    own = [name for name in environ if re.fullmatch(r"(PRTE|OMPI)_MCA_plm_(ssh|rsh)_agent|HYDRA_LAUNCHER.*", name)]
    by_mpi = choice.launcher in ("mpirun", "mpiexec") and choice.mpi is not None and choice.mpi.kind != "pals"
    return not own and (choice.launcher == "ssh" or (by_mpi and not scheduler))
