"""A job as a script for the qsub of PBS Professional and OpenPBS."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import RUNS_AGAIN, Directives, write_output, write_run, write_script
from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob, format_clock


def write_qsub(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for what PBS cannot be told."""
    place = [
        "",
        "# PBS starts in the home folder.",
        'cd "$PBS_O_WORKDIR" || exit 1',
        "# PBS keeps output back until the end; this log grows while the job runs, and is added to if it runs again.",
        f"exec >>{write_output(job, '${PBS_JOBID%%.*}')} 2>&1",
    ]
    how = "PBS Professional and OpenPBS: qsub FILE runs it."
    return write_script(job, "#PBS", how, _list_directives(job), _write_run(job), place=place)


def _list_directives(job: BatchJob) -> Iterator[Directives]:
    chunk = f"{job.nodes}:ncpus={job.tasks_per_node * (job.cpus or 1)}:mpiprocs={job.tasks_per_node}"
    chunk += f":ngpus={job.gpus}" if job.gpus else ""
    chunk += f":mem={job.memory_unit.lower()}b" if job.memory else ""
    yield True, "-S /bin/bash", f"-N {job.name}"
    parts = "Chunks, and in each: cores (ncpus), ranks (mpiprocs; without it there would be one), GPUs, memory."
    yield True, parts, f"-l select={chunk}"
    yield True, "One chunk a node.", "-l place=scatter", f"-l walltime={format_clock(job.seconds)}"
    yield job.account, f"-A {job.account}"
    yield job.queue, f"-q {job.queue}"
    yield job.requeue, RUNS_AGAIN, "-r y"
    yield not job.requeue, "A lost node ends the job; PBS would start it once more, from the beginning.", "-r n"
    after = f"-W depend=afterok:{':'.join(job.dependencies)}"
    yield job.dependencies, "Not before these jobs have succeeded.", after
    yield job.mail, "At its beginning, end and abortion.", "-m abe", f"-M {job.mail}"
    login = "PBS begins with the environment of a login; -V brings that of qsub, with the Python that hvdrun is in."
    yield not job.venv and not job.modules, login, "-V"
    yield True, "What PBS itself has to say (time exceeded, for instance) comes here at the end.", "-j oe"


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


_STATES = {
    "R": ("running", "running"),
    "E": ("running", "exiting"),
    "Q": ("waiting", "queued"),
    "H": ("waiting", "held"),
    "W": ("waiting", "waiting"),
    "T": ("waiting", "moving"),
    "S": ("waiting", "suspended"),
}


def read_pbs_state(text: str) -> State | None:
    """Read `qstat -x -f ID`."""
    fields = dict(re.findall(r"^[ \t]+(job_state|Exit_status|comment) = (.*)$", text, re.MULTILINE))
    letter = fields.get("job_state", "")
    if letter in ("F", "C", "X"):
        code = fields.get("Exit_status", "").strip()
        # Negative: PBS itself ended it. Above 256: a signal.
        status = int(code) if re.fullmatch(r"-?\d+", code) else None
        if status is not None:
            status = 1 if status < 0 else status - 256 + 128 if status > 256 else status
        return State("ended", "finished", status)
    return State(*_STATES[letter]) if letter in _STATES else None


PBS = Scheduler(
    title="PBS",
    write=write_qsub,
    submit=("qsub",),
    read_id=first_match(r"(?m)^(\d+(?:\.[A-Za-z0-9.-]+)?)\s*$"),
    ask=lambda job: ("qstat", "-x", "-f", job),
    read_state=read_pbs_state,
    cancel=lambda job: ("qdel", job),
)
