"""A job as a script for LSF's bsub."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.body import RUNS_AGAIN, Directives, write_output, write_run, write_script
from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob, format_minutes


def write_bsub(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for what LSF cannot be told."""
    how = "LSF: bsub < FILE runs it (the < matters, or these lines are not read)."
    place = [
        "",
        "# LSF keeps output back until the end; this way the log grows while the job runs.",
        f"exec >>{write_output(job, '$LSB_JOBID')} 2>&1",
    ]
    # At the time limit LSF sends USR2, and kills ten minutes later.
    ended_by = ["TERM"] if job.warning and job.warning.signal == "USR2" else ["TERM", "USR2"]
    run = write_run(job, warned_by="LSF sends it, maybe to hvdrun as well", ended_by=ended_by, after=[])
    return write_script(job, "#BSUB", how, _list_directives(job), run, place=place)


def _list_directives(job: BatchJob) -> Iterator[Directives]:
    yield True, f"-J {job.name}"
    yield True, "Ranks of the whole job, and how many of them go on a node.", f"-n {job.tasks}"
    yield True, f'-R "span[ptile={job.tasks_per_node}]"'
    yield True, "Hours and minutes.", f"-W {format_minutes(job.seconds)}"
    yield job.gpus, "Of each node.", f'-gpu "num={job.gpus}"'
    yield job.cpus, "Cores of each rank.", f'-R "affinity[core({job.cpus})]"'
    yield job.memory, "Of each node.", f'-R "rusage[mem={job.memory_unit}B/host]"'
    yield job.account, f"-P {job.account}"
    yield job.queue, f"-q {job.queue}"
    output = job.output.replace("%x", job.name).replace("%j", "%J")
    yield True, "LSF adds its report to the log at the end; %J is the job's id.", f"-o {output}"
    yield job.requeue, RUNS_AGAIN, "-r"
    again = "So does this exit code, by agreement with the training: saved, not finished."
    yield job.requeue, again, f'-Q "{TRY_AGAIN}"'
    yield not job.requeue, "A lost node ends the job, also in a queue that would start it once more.", "-rn"
    if job.warning:
        before = f"-wt {format_minutes(job.warning.seconds)}"
        yield True, "In hours and minutes before the time is up.", f"-wa {job.warning.signal}", before
    condition = " && ".join(f"done({one})" for one in job.dependencies)
    yield job.dependencies, "Not before these jobs have succeeded.", f'-w "{condition}"'
    yield job.mail, "At its beginning and end.", "-B", "-N", f"-u {job.mail}"


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
    write=write_bsub,
    submit=("bsub",),
    read_id=first_match(r"Job <(\d+)> is submitted"),
    ask=lambda job: ("bjobs", "-noheader", "-o", "stat exit_code", job),
    read_state=read_lsf_state,
    cancel=lambda job: ("bkill", job),
)
