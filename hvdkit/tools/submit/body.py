"""Batch scripts: directives, and the part that is bash and the same for every scheduler."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from hvdkit.tools.submit.job import BatchJob, check_job

#: Whether they are wanted, then lines: directives, which begin with a dash, and comments on them.
Directives = tuple[object, ...]
RUNS_AGAIN = "A lost node or a preemption runs this script again: the training has to find its own checkpoint."


def write_script(
    job: BatchJob,
    directive: str,
    how: str,
    directives: Iterable[Directives],
    run: Iterable[str],
    *,
    place: Iterable[str] = (),
) -> str:
    """Write the script. Raises SubmitError for what no batch script may contain.

    directive: what a line for the scheduler begins with. how: the scheduler, and how the script is submitted.
    run, place: lines of `write_run`, and those before the environment.
    """
    check_job(job, directive)
    lines = ["#!/bin/bash -l" if job.modules else "#!/bin/bash", f"# Written by hvdkit submit for {how}"]
    for is_wanted, *texts in directives:
        if is_wanted:
            lines += [f"{directive} {text}" if str(text).startswith("-") else f"# {text}" for text in texts]
    return "\n".join([*lines, *job.extra, *place, *write_environment(job), *run]) + "\n"


def write_output(job: BatchJob, job_id: str) -> str:
    """Write the log's path as a word of bash.

    job_id: what bash calls the job's id.
    """
    parts = job.output.replace("%x", job.name).split("%j")
    return f'"{job_id}"'.join(shlex.quote(part) if part else "" for part in parts)


def write_environment(job: BatchJob) -> list[str]:
    """Write what the ranks are to find: modules, virtual environment, variables."""
    lines: list[str] = []
    if job.modules:
        lines += [
            "",
            "# Modules, as at a login. A node begins without those that were loaded where this was submitted.",
        ]
        lines += [f"module load {shlex.quote(module)} || exit 1" for module in job.modules]
    if job.venv:
        lines += ["", f"source {shlex.quote(job.venv.rstrip('/') + '/bin/activate')} || exit 1"]
    if job.environ:
        lines += ["", "# hvdrun takes these to every rank."]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environ.items()]
    return lines


def write_run(
    job: BatchJob,
    *,
    warned_by: str,
    ended_by: Sequence[str] = ("TERM",),
    before: Sequence[str] = (),
    after: Sequence[str],
) -> list[str]:
    """Write how the ranks are started, told of signals, and waited for.

    warned_by: who sends the warning to whom, for the comment.
    ended_by: the signals by which the scheduler asks the job to end.
    before: lines that follow the traps. after: lines that look at $status when all is over.
    """
    lines = [
        "",
        "command -v hvdrun >/dev/null || {",
        '    echo "hvdrun is not on PATH on $(hostname): give hvdkit submit --venv DIR, or --module M" >&2',
        "    exit 127",
        "}",
        "",
        "# bash runs a trap only between commands or during wait: so hvdrun runs beside the script, which waits.",
        "job='' told='' early=''",
        "pass_on() {",
        "    told=yes",
        '    if [ -n "$job" ]; then kill -s "$1" "$job" 2>/dev/null; elif [ "$early" != TERM ]; then early=$1; fi',
        "}",
        "# The end is near (cancelled, preempted, requeued, out of time): hvdrun ends all ranks, on every node; those",
        "# that have a handler for it save first.",
        f"trap 'pass_on TERM' {' '.join(ended_by)}",
    ]
    if job.warning:
        lines += [
            f"# {warned_by}, about {job.warning.seconds} seconds before the time is up.",
            "# hvdrun passes it to every rank, which saves and ends. A program without a handler for it dies of it.",
            f"trap 'pass_on {job.warning.signal}' {job.warning.signal}",
        ]
    return [
        *lines,
        *before,
        "",
        "# Where and how many ranks, hvdrun reads from the allocation.",
        f"hvdrun {shlex.join(job.hvdrun_words)} &",
        "job=$!",
        '[ -z "$early" ] || kill -s "$early" "$job" # a signal came before its number was known',
        "while",
        "    told=''",
        '    wait "$job"',
        "    status=$?",
        '    [ -n "$told" ] # a trap ends wait early: then wait again',
        "do :; done",
        *after,
        "",
        'exit "$status"',
    ]
