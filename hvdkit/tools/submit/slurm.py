"""A job as a script for Slurm's sbatch."""

from __future__ import annotations

import re

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import write_environment, write_run
from hvdkit.tools.submit.job import BatchJob, check_job, format_clock
from hvdkit.tools.submit.scheduler import Scheduler, State, first_match

DIRECTIVE = "#SBATCH"


def write_script(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for what Slurm cannot be told."""
    check_job(job, DIRECTIVE)
    return "\n".join([*_write_head(job), *write_environment(job), *_write_run(job)]) + "\n"


def _write_head(job: BatchJob) -> list[str]:
    shell = "#!/bin/bash -l" if job.modules else "#!/bin/bash"
    lines = [
        shell,
        "# Written by hvdkit submit for Slurm: sbatch FILE runs it.",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        "# One task a rank, so one a GPU where there are GPUs.",
        f"#SBATCH --ntasks-per-node={job.tasks_per_node}",
        f"#SBATCH --time={format_clock(job.seconds, days=True)}",
    ]
    if job.gpus:
        lines += ["# Of each node, not of the job.", f"#SBATCH --gpus-per-node={job.gpus}"]
    if job.cpus:
        lines.append(f"#SBATCH --cpus-per-task={job.cpus}")
    if job.memory:
        lines += ["# Of each node.", f"#SBATCH --mem={job.memory_unit}"]
    if job.account:
        lines.append(f"#SBATCH --account={job.account}")
    if job.queue:
        lines.append(f"#SBATCH --partition={job.queue}")
    lines += [
        "# Output and errors together; %x is the job's name and %j its id.",
        f"#SBATCH --output={job.output}",
    ]
    if job.requeue:
        lines += [
            "# A lost node or a preemption puts the job back into the queue, for 2 minutes at least, and runs this",
            "# script again with SLURM_RESTART_COUNT set: the training has to find its own checkpoint.",
            "#SBATCH --requeue",
            "# The log is added to.",
            "#SBATCH --open-mode=append",
        ]
    else:
        lines += [
            "# A lost node ends the job; most sites would start it once more, from the beginning.",
            "#SBATCH --no-requeue",
        ]
    if job.warning:
        lines += [
            "# B: is for this script alone. Without it Slurm signals steps too, mpirun's daemons among them, and they",
            "# die of it. It may come up to a minute early.",
            f"#SBATCH --signal=B:{job.warning.signal}@{job.warning.seconds}",
        ]
    if job.dependencies:
        lines += [
            "# Not before these jobs have succeeded.",
            f"#SBATCH --dependency=afterok:{':'.join(job.dependencies)}",
        ]
    if job.mail:
        lines += ["#SBATCH --mail-type=BEGIN,END,FAIL,REQUEUE", f"#SBATCH --mail-user={job.mail}"]
    return [*lines, *job.extra]


def _write_run(job: BatchJob) -> list[str]:
    before, after = [], []
    if job.requeue:
        before = [
            "# Slurm itself requeues what it preempts; what was cancelled is not to come back.",
            "ended=''",
            "trap 'ended=yes; pass_on TERM' TERM",
        ]
        after = [
            "",
            f"# {TRY_AGAIN}, by agreement with the training: saved, not finished. Slurm requeues none of itself.",
            f'[ "$status" -ne {TRY_AGAIN} ] || [ -n "$ended" ] || scontrol requeue "$SLURM_JOB_ID" || exit 1',
        ]
    return write_run(job, warned_by="Slurm sends it to this script alone", before=before, after=after)


def read_slurm_state(text: str) -> State | None:
    """Read `scontrol --oneliner show job ID`."""
    fields = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", text))
    state = fields.get("JobState", "")
    if not state:
        return None
    reason = fields.get("Reason", "None")
    if state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED"):
        return State("waiting", state.lower() + (f" ({reason})" if reason != "None" else ""))
    if state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"):
        return State("running", state.lower())
    code, _, number = fields.get("ExitCode", "").partition(":")
    known = code.isdecimal() and number.isdecimal()
    status = (128 + int(number) if int(number) else int(code)) if known else None
    return State("ended", state.lower(), 0 if state == "COMPLETED" else status or 1)


SLURM = Scheduler(
    title="Slurm",
    write=write_script,
    submit=("sbatch", "--parsable"),
    read_id=first_match(r"(?m)^(\d+)(?:;\S*)?\s*$"),
    ask=lambda job: ("scontrol", "--oneliner", "show", "job", job),
    read_state=read_slurm_state,
    cancel=lambda job: ("scancel", job),
)
