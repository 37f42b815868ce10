"""Hand a script to a scheduler, and ask how the job stands."""

from __future__ import annotations

import os
import shlex
import subprocess

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.scheduler import Scheduler, State

_SUBMIT_S, _ASK_S = 120.0, 60.0


def submit_script(scheduler: Scheduler, script: str) -> str:
    """Submit a script; returns the job's id.

    Raises SubmitError with what the scheduler said if it does not take it.
    """
    command = shlex.join(scheduler.submit)
    try:
        answer = subprocess.run(
            scheduler.submit, input=os.fsencode(script), capture_output=True, timeout=_SUBMIT_S, check=False
        )
    except FileNotFoundError:
        raise SubmitError(
            f"There is no {scheduler.submit[0]} on PATH. Run this where {scheduler.title} jobs are submitted, "
            "or print the script with --dry-run and take it there."
        ) from None
    except subprocess.TimeoutExpired:
        raise SubmitError(
            f"{command} has not answered for {_SUBMIT_S:.0f} s. Look whether the job is queued before trying again."
        ) from None
    said = (answer.stdout + answer.stderr).decode(errors="replace").strip()
    if answer.returncode:
        raise SubmitError(f"{command} refused the job, with status {answer.returncode}: {said or 'it gave no reason'}")
    job_id = scheduler.read_id(answer.stdout.decode(errors="replace"))
    if not job_id:
        raise SubmitError(f"{command} took the job, but its answer has no job id: {said!r}. Look for it in the queue.")
    return job_id


def ask_state(scheduler: Scheduler, job_id: str) -> State | None:
    """Ask how a job stands; None if there is no answer now."""
    try:
        answer = subprocess.run(
            scheduler.ask(job_id), stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return scheduler.read_state(answer.stdout.decode(errors="replace"))
