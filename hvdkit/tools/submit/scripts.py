"""Batch scripts for Slurm, PBS and LSF: the directives, and the bash code that all schedulers share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob, check_job, format_clock, format_minutes

#: Whether the lines are written, then the lines: directives, which begin with a dash, and comments on them.
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
    """Write the script. Raises SubmitError for values that no batch script may contain.

    job: the job.
    directive: prefix of a line for the scheduler.
    how: the scheduler, and the command that submits the script.
    directives: the directives.
    run: lines of `write_run`.
    place: lines before the environment.
    """
    check_job(job, directive)
    lines = ["#!/bin/bash -l" if job.modules else "#!/bin/bash", f"# Written by hvdkit submit for {how}"]
    for is_wanted, *texts in directives:
        if is_wanted:
            lines += [f"{directive} {text}" if str(text).startswith("-") else f"# {text}" for text in texts]
    return "\n".join([*lines, *job.extra, *place, *write_environment(job), *run]) + "\n"


def write_output(job: BatchJob, job_id: str) -> str:
    """Write the log's path as a word of bash.

    job_id: bash expression for the job's id.
    """
    parts = job.output.replace("%x", job.name).split("%j")
    return f'"{job_id}"'.join(shlex.quote(part) if part else "" for part in parts)


def write_environment(job: BatchJob) -> list[str]:
    """Write the lines for modules, virtual environment and variables of the ranks."""
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
    end_lines: Sequence[str] = (),
    on_end: str = "pass_on TERM",
    before: Sequence[str] = (),
    after: Sequence[str],
) -> list[str]:
    """Write the lines that start the ranks, forward signals to them, and wait for them.

    job: the job.
    warned_by: who sends the warning to whom, for the comment.
    ended_by: the signals by which the scheduler ends the job.
    end_lines: lines before the trap of these signals.
    on_end: the command of that trap.
    before: lines after the traps.
    after: lines that check $status at the end.
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
        *end_lines,
        f"trap '{on_end}' {' '.join(ended_by)}",
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


def write_sbatch(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for options that Slurm does not have."""
    return write_script(job, "#SBATCH", "Slurm: sbatch FILE runs it.", _slurm_directives(job), _run_under_slurm(job))


def _slurm_directives(job: BatchJob) -> Iterator[Directives]:
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


def _run_under_slurm(job: BatchJob) -> list[str]:
    warned_by = "Slurm sends it to this script alone"
    if not job.requeue:
        return write_run(job, warned_by=warned_by, after=[])
    return write_run(
        job,
        warned_by=warned_by,
        end_lines=[
            "# Slurm itself requeues what it preempts; what was cancelled is not to come back.",
            "ended=''",
        ],
        on_end="ended=yes; pass_on TERM",
        after=[
            "",
            f"# {TRY_AGAIN}, by agreement with the training: saved, not finished. Slurm requeues none of itself.",
            f'[ "$status" -ne {TRY_AGAIN} ] || [ -n "$ended" ] || scontrol requeue "$SLURM_JOB_ID" || exit 1',
        ],
    )


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


def write_qsub(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for options that PBS does not have."""
    place = [
        "",
        "# PBS starts in the home folder.",
        'cd "$PBS_O_WORKDIR" || exit 1',
        "# PBS keeps output back until the end; this log grows while the job runs, and is added to if it runs again.",
        f"exec >>{write_output(job, '${PBS_JOBID%%.*}')} 2>&1",
    ]
    how = "PBS Professional and OpenPBS: qsub FILE runs it."
    return write_script(job, "#PBS", how, _pbs_directives(job), _run_under_pbs(job), place=place)


def _pbs_directives(job: BatchJob) -> Iterator[Directives]:
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


def _run_under_pbs(job: BatchJob) -> list[str]:
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


_PBS_STATES = {
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
    return State(*_PBS_STATES[letter]) if letter in _PBS_STATES else None


PBS = Scheduler(
    title="PBS",
    write=write_qsub,
    submit=("qsub",),
    read_id=first_match(r"(?m)^(\d+(?:\.[A-Za-z0-9.-]+)?)\s*$"),
    ask=lambda job: ("qstat", "-x", "-f", job),
    read_state=read_pbs_state,
    cancel=lambda job: ("qdel", job),
)


def write_bsub(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for options that LSF does not have."""
    how = "LSF: bsub < FILE runs it (the < matters, or these lines are not read)."
    place = [
        "",
        "# LSF keeps output back until the end; this way the log grows while the job runs.",
        f"exec >>{write_output(job, '$LSB_JOBID')} 2>&1",
    ]
    ended_by = ["TERM"] if job.warning and job.warning.signal == "USR2" else ["TERM", "USR2"]
    limit = ["# At the time limit LSF sends USR2, and kills the job ten minutes later."] if "USR2" in ended_by else []
    warned_by = "LSF sends it, maybe to hvdrun as well"
    run = write_run(job, warned_by=warned_by, ended_by=ended_by, end_lines=limit, after=[])
    return write_script(job, "#BSUB", how, _lsf_directives(job), run, place=place)


def _lsf_directives(job: BatchJob) -> Iterator[Directives]:
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
