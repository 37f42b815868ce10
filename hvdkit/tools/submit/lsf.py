"""A job as a script for LSF's bsub."""

from __future__ import annotations

import re

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import write_environment, write_output, write_run
from hvdkit.tools.submit.job import BatchJob, check_job, format_minutes
from hvdkit.tools.submit.scheduler import Scheduler, State, first_match

DIRECTIVE = "#BSUB"


def write_script(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for what LSF cannot be told."""
    check_job(job, DIRECTIVE)
    return "\n".join([*_write_head(job), *_write_place(job), *write_environment(job), *_write_run(job)]) + "\n"


def _write_head(job: BatchJob) -> list[str]:
    shell = "#!/bin/bash -l" if job.modules else "#!/bin/bash"
    output = job.output.replace("%x", job.name).replace("%j", "%J")
    lines = [
        shell,
        "# Written by hvdkit submit for LSF: bsub < FILE runs it (the < matters, or these lines are not read).",
        f"#BSUB -J {job.name}",
        "# Ranks of the whole job, and how many of them go on a node.",
        f"#BSUB -n {job.tasks}",
        f'#BSUB -R "span[ptile={job.tasks_per_node}]"',
        "# Hours and minutes.",
        f"#BSUB -W {format_minutes(job.seconds)}",
    ]
    if job.gpus:
        lines += ["# Of each node.", f'#BSUB -gpu "num={job.gpus}"']
    if job.cpus:
        lines += ["# Cores of each rank.", f'#BSUB -R "affinity[core({job.cpus})]"']
    if job.memory:
        lines += ["# Of each node.", f'#BSUB -R "rusage[mem={job.memory_unit}B/host]"']
    if job.account:
        lines.append(f"#BSUB -P {job.account}")
    if job.queue:
        lines.append(f"#BSUB -q {job.queue}")
    lines += ["# LSF adds its report to the log at the end; %J is the job's id.", f"#BSUB -o {output}"]
    if job.requeue:
        lines += [
            "# A lost node or a preemption runs this script again: the training has to find its own checkpoint.",
            "#BSUB -r",
            "# So does this exit code, by agreement with the training: saved, not finished.",
            f'#BSUB -Q "{TRY_AGAIN}"',
        ]
    else:
        lines += ["# A lost node ends the job, also in a queue that would start it once more.", "#BSUB -rn"]
    if job.warning:
        lines += [
            "# In hours and minutes before the time is up.",
            f"#BSUB -wa {job.warning.signal}",
            f"#BSUB -wt {format_minutes(job.warning.seconds)}",
        ]
    if job.dependencies:
        condition = " && ".join(f"done({one})" for one in job.dependencies)
        lines += ["# Not before these jobs have succeeded.", f'#BSUB -w "{condition}"']
    if job.mail:
        lines += ["# At its beginning and end.", "#BSUB -B", "#BSUB -N", f"#BSUB -u {job.mail}"]
    return [*lines, *job.extra]


def _write_place(job: BatchJob) -> list[str]:
    return [
        "",
        "# LSF keeps output back until the end; this way the log grows while the job runs.",
        f"exec >>{write_output(job, '$LSB_JOBID')} 2>&1",
    ]


def _write_run(job: BatchJob) -> list[str]:
    # At the time limit LSF sends USR2, and kills ten minutes later.
    ended_by = ["TERM"] if job.warning and job.warning.signal == "USR2" else ["TERM", "USR2"]
    return write_run(job, warned_by="LSF sends it, maybe to hvdrun as well", ended_by=ended_by, after=[])


def read_lsf_state(text: str) -> State | None:
    """Read `bjobs -noheader -o "stat exit_code" ID`."""
    word, _, code = text.strip().partition(" ")
    if word in ("DONE", "EXIT"):
        status = int(code) if code.strip().isdecimal() else None
        return State("ended", word.lower(), 0 if word == "DONE" else status or 1)
    if word in ("RUN", "USUSP", "SSUSP", "UNKWN", "PROV"):
        return State("running", word.lower())
    return State("waiting", word.lower()) if re.fullmatch("[A-Z]+", word) else None


LSF = Scheduler(
    title="LSF",
    write=write_script,
    submit=("bsub",),
    read_id=first_match(r"Job <(\d+)> is submitted"),
    ask=lambda job: ("bjobs", "-noheader", "-o", "stat exit_code", job),
    read_state=read_lsf_state,
    cancel=lambda job: ("bkill", job),
)
