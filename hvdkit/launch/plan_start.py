"""Plan the first start of a job, or another one after a loss, from its options and facts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvdkit.errors import LaunchError
from hvdkit.launch.facts import Facts
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.selected_launcher import SelectedLauncher, select_launcher
from hvdkit.launch.plan_elastic import describe_restarts, starts_over_ssh
from hvdkit.launch.plan_job import plan_job, with_elasticity


@dataclass(frozen=True)
class StartPlan:
    """A job and its launcher, with the options and facts of the plan. over_ssh: ranks are started over ssh."""

    options: LaunchOptions
    facts: Facts
    job: Job
    choice: SelectedLauncher
    over_ssh: bool


def plan_start(options: LaunchOptions, facts: Facts) -> StartPlan:
    """Plan the first start. Raises LaunchError for a job that cannot be started."""
    if facts.launchers is None:
        raise LaunchError(
            "The launchers of this machine were not examined. This is a bug in hvdkit.",
            code="bug-launchers-not-examined",
        )
    job = plan_job(options, facts)
    choice = select_launcher(facts.launchers, options.launcher)
    restarts = describe_restarts(job, choice)
    if restarts:
        job = with_elasticity(job, Elasticity.RESTART)
        job = replace(job, notes=(*job.notes, restarts))
    return StartPlan(options, facts, job, choice, starts_over_ssh(choice, facts.launchers.scheduler, job.environ))


def plan_restart(plan: StartPlan, facts: Facts, ranks: int, number: int) -> Job:
    """Plan the job for another start.

    plan: of the first start.
    facts: with the hosts of this start.
    ranks: number of ranks.
    number: of the start, from 2.
    """
    job = with_elasticity(plan_job(plan.options, facts, ranks), plan.job.elasticity)
    return replace(job, variables={**job.variables, "HVDKIT_START": str(number)})
