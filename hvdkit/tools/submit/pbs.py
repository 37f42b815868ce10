"""A job as a script for the qsub of PBS Professional and OpenPBS."""

from __future__ import annotations

import re

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import write_environment, write_output, write_run
from hvdkit.tools.submit.job import BatchJob, check_job, format_clock
from hvdkit.tools.submit.scheduler import Scheduler, State, first_match

DIRECTIVE = "#PBS"


def write_script(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for what PBS cannot be told."""
    check_job(job, DIRECTIVE)
    return "\n".join([*_write_head(job), *_write_place(job), *write_environment(job), *_write_run(job)]) + "\n"


def _write_head(job: BatchJob) -> list[str]:
    chunk = f"{job.nodes}:ncpus={job.tasks_per_node * (job.cpus or 1)}:mpiprocs={job.tasks_per_node}"
    chunk += f":ngpus={job.gpus}" if job.gpus else ""
    chunk += f":mem={job.memory_unit.lower()}b" if job.memory else ""
    shell = "#!/bin/bash -l" if job.modules else "#!/bin/bash"
    lines = [
        shell,
        "# Written by hvdkit submit for PBS Professional and OpenPBS: qsub FILE runs it.",
        "#PBS -S /bin/bash",
        f"#PBS -N {job.name}",
        "# Chunks, and in each: cores (ncpus), ranks (mpiprocs; without it there would be one), GPUs, memory.",
        f"#PBS -l select={chunk}",
        "# One chunk a node.",
        "#PBS -l place=scatter",
        f"#PBS -l walltime={format_clock(job.seconds)}",
    ]
    if job.account:
        lines.append(f"#PBS -A {job.account}")
    if job.queue:
        lines.append(f"#PBS -q {job.queue}")
    if job.requeue:
        lines += [
            "# A lost node or a preemption runs this script again: the training has to find its own checkpoint.",
            "#PBS -r y",
        ]
    else:
        lines += ["# A lost node ends the job; PBS would start it once more, from the beginning.", "#PBS -r n"]
    if job.dependencies:
        lines += ["# Not before these jobs have succeeded.", f"#PBS -W depend=afterok:{':'.join(job.dependencies)}"]
    if job.mail:
        lines += ["# At its beginning, end and abortion.", "#PBS -m abe", f"#PBS -M {job.mail}"]
    if not job.venv and not job.modules:
        lines += [
            "# PBS begins with the environment of a login; -V brings that of qsub, with the Python that hvdrun is in.",
            "#PBS -V",
        ]
    lines += ["# What PBS itself has to say (time exceeded, for instance) comes here at the end.", "#PBS -j oe"]
    return [*lines, *job.extra]


def _write_place(job: BatchJob) -> list[str]:
    return [
        "",
        "# PBS starts in the home folder.",
        'cd "$PBS_O_WORKDIR" || exit 1',
        "# PBS keeps output back until the end; this log grows while the job runs, and is added to if it runs again.",
        f"exec >>{write_output(job, '${PBS_JOBID%%.*}')} 2>&1",
    ]


def _write_run(job: BatchJob) -> list[str]:
    before, after = [], []
    if job.warning:
        before = [
            "",
            "# PBS gives no warning, so the script sends itself one.",
            f"(sleep {job.seconds - job.warning.seconds} && kill -s {job.warning.signal} $$) 2>/dev/null &",
            "clock=$!",
            "trap 'pkill -P \"$clock\"' EXIT",
        ]
    if job.requeue:
        after = [
            "",
            f"# {TRY_AGAIN}, by agreement with the training: saved, not finished. Only operators may requeue (qrerun).",
            f'[ "$status" -ne {TRY_AGAIN} ] || echo "Saved, not finished: submit the job again to go on." >&2',
        ]
    return write_run(job, warned_by="It is sent below", before=before, after=after)


def read_pbs_state(text: str) -> State | None:
    """Read `qstat -x -f ID`."""
    fields = dict(re.findall(r"^[ \t]+(job_state|Exit_status|comment) = (.*)$", text, re.MULTILINE))
    letter = fields.get("job_state", "")
    words = {
        "Q": "queued",
        "H": "held",
        "W": "waiting",
        "T": "moving",
        "S": "suspended",
        "R": "running",
        "E": "exiting",
    }
    if letter in ("F", "C", "X"):
        code = fields.get("Exit_status", "").strip()
        # Negative: PBS itself ended it. Above 256: a signal.
        status = int(code) if re.fullmatch(r"-?\d+", code) else None
        if status is not None:
            status = 1 if status < 0 else status - 256 + 128 if status > 256 else status
        return State("ended", "finished", status)
    if letter in ("R", "E"):
        return State("running", words[letter])
    return State("waiting", words[letter]) if letter in words else None


PBS = Scheduler(
    title="PBS",
    write=write_script,
    submit=("qsub",),
    read_id=first_match(r"(?m)^(\d+(?:\.[A-Za-z0-9.-]+)?)\s*$"),
    ask=lambda job: ("qstat", "-x", "-f", job),
    read_state=read_pbs_state,
    cancel=lambda job: ("qdel", job),
)
