"""A job as a script for Slurm's sbatch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import Directives, write_run, write_script
from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob, format_clock


def write_sbatch(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for what Slurm cannot be told."""
    return write_script(job, "#SBATCH", "Slurm: sbatch FILE runs it.", _list_directives(job), _write_run(job))


def _list_directives(job: BatchJob) -> Iterator[Directives]:
    yield True, f"--job-name={job.name}", f"--nodes={job.nodes}"
    yield True, "One task a rank, so one a GPU where there are GPUs.", f"--ntasks-per-node={job.tasks_per_node}"
    yield True, f"--time={format_clock(job.seconds, days=True)}"
    yield job.gpus, "Of each node, not of the job.", f"--gpus-per-node={job.gpus}"
    yield job.cpus, f"--cpus-per-task={job.cpus}"
    yield job.memory, "Of each node.", f"--mem={job.memory_unit}"
    yield job.account, f"--account={job.account}"
    yield job.queue, f"--partition={job.queue}"
    yield True, "Output and errors together; %x is the job's name and %j its id.", f"--output={job.output}"
    yield (
        job.requeue,
        "A lost node or a preemption puts the job back into the queue, for 2 minutes at least, and runs this",
        "script again with SLURM_RESTART_COUNT set: the training has to find its own checkpoint.",
        "--requeue",
        "The log is added to.",
        "--open-mode=append",
    )
    lost = "A lost node ends the job; most sites would start it once more, from the beginning."
    yield not job.requeue, lost, "--no-requeue"
    if job.warning:
        yield (
            True,
            "B: is for this script alone. Without it Slurm signals steps too, mpirun's daemons among them, and they",
            "die of it. It may come up to a minute early.",
            f"--signal=B:{job.warning.signal}@{job.warning.seconds}",
        )
    after = f"--dependency=afterok:{':'.join(job.dependencies)}"
    yield job.dependencies, "Not before these jobs have succeeded.", after
    yield job.mail, "--mail-type=BEGIN,END,FAIL,REQUEUE", f"--mail-user={job.mail}"


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
    write=write_sbatch,
    submit=("sbatch", "--parsable"),
    read_id=first_match(r"(?m)^(\d+)(?:;\S*)?\s*$"),
    ask=lambda job: ("scontrol", "--oneliner", "show", "job", job),
    read_state=read_slurm_state,
    cancel=lambda job: ("scancel", job),
)
