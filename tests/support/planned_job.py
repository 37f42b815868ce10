"""A job planned from hvdrun's arguments, without a look at this machine's launchers."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan_job import plan_job as plan
from hvdkit.launch.prepare import collect_facts


def plan_job(options: LaunchOptions, environ: Mapping[str, str]) -> Job:
    return plan(options, collect_facts(options, environ))
