"""A job as a script for Slurm's sbatch."""

from __future__ import annotations

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import write_environment, write_run
from hvdkit.tools.submit.job import BatchJob, check_job
from hvdkit.tools.submit.times import format_clock

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
