"""A batch job as data, with checks of its values, and its times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hvdkit.errors import SubmitError

# Each scheduler has quoting rules of its own for directives: these characters are safe in all of them.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+,=-]*", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9_./%][A-Za-z0-9_.:/@+,=%-]*", re.ASCII)
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+=-]*", re.ASCII)
_JOB = re.compile(r"[1-9]\d*(\[\d*\])?(\.[A-Za-z0-9.-]+)?", re.ASCII)
_MAIL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(@[A-Za-z0-9.-]+)?", re.ASCII)
_MEMORY = re.compile(r"[1-9]\d{0,9}[kKmMgGtT][bB]?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SIGNAL = re.compile(r"(?:SIG)?(USR[12])(?:@(\w+))?", re.ASCII)
_UNITS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?", re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", re.ASCII)
_TIME_EXAMPLES = "Write it like 2h, 90m, 1d12h or 02:00:00"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Warning:
    """A signal that the ranks receive before the time limit.

    signal: USR1 or USR2. seconds: how long before the limit.
    """

    signal: str
    seconds: int


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch job: its command, resources and time limit.

    command: the command that hvdrun runs.
    nodes: number of nodes.
    tasks_per_node: number of ranks on each node.
    seconds: the time limit.
    name: the job's name.
    gpus: GPUs of a node.
    cpus: CPUs of a task.
    memory: memory of a node, for example 64G.
    account, queue: the scheduler's account and queue; "" for its default.
    output: the log; %j stands for the job's id and %x for its name.
    requeue: may the scheduler run the job again?
    warning: signal before the time limit; None for none.
    environ: variables of the ranks.
    modules: modules to load.
    venv: folder of a virtual environment.
    mail: the address for the scheduler's mail.
    extra: lines to add to the directives unchanged.
    image: image of the containers; Kubernetes only.
    dependencies: ids of jobs that must succeed before.
    hvdrun: options of hvdrun.
    """

    command: tuple[str, ...]
    nodes: int
    tasks_per_node: int
    seconds: int
    name: str = "train"
    gpus: int = 0
    cpus: int = 0
    memory: str = ""
    account: str = ""
    queue: str = ""
    output: str = "%x-%j.log"
    requeue: bool = False
    warning: Warning | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    venv: str = ""
    mail: str = ""
    extra: tuple[str, ...] = ()
    image: str = ""
    dependencies: tuple[str, ...] = ()
    hvdrun: tuple[str, ...] = ()

    @property
    def memory_unit(self) -> str:
        """The memory with one letter for its unit, for example 64G."""
        return self.memory.rstrip("bB").upper()

    @property
    def hvdrun_words(self) -> tuple[str, ...]:
        """The words after hvdrun on its command line: its options, then the command."""
        dashes = ("--",) if self.command[0].startswith("-") else ()
        return (*self.hvdrun, *dashes, *self.command)

    @property
    def tasks(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.tasks_per_node


def parse_warning(text: str) -> Warning:
    """Turn USR1@120 (seconds), USR1@5m or USR1 (a minute) into a Warning; ValueError for anything else."""
    found = _SIGNAL.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r} is not SIGNAL@TIME with USR1 or USR2, which hvdrun forwards to the ranks. "
            "Write it like USR1@120 or USR1@5m."
        )
    name, time = found.groups("60")
    return Warning(name, int(time) if time.isdecimal() and int(time) else parse_time(time))


def parse_variable(text: str) -> tuple[str, str]:
    """Turn NAME=VALUE into name and value; ValueError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise ValueError(f"{text!r} is not NAME=VALUE. Write it like OMP_NUM_THREADS=4.")
    return name, value


def parse_time(text: str) -> int:
    """Turn 2h, 90m, 1d12h, 02:00:00 or 1-12:00:00 into seconds.

    Raises ValueError for anything else: a bare number would be minutes to one scheduler and seconds to another.
    """
    found = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        reason = "has no unit" if text.isdecimal() and text.strip("0") else "is not a time" if not found else "is zero"
        raise ValueError(f"{text!r} {reason}. {_TIME_EXAMPLES}.")
    return total


def format_clock(seconds: int, *, days: bool = False) -> str:
    """Write seconds as HH:MM:SS, or with days=True as D-HH:MM:SS from one day up."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if days and hours >= 24:
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{rest:02}"
    return f"{hours:02}:{minutes:02}:{rest:02}"


def format_minutes(seconds: int) -> str:
    """Write seconds as HH:MM, rounded up, the format of LSF."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def check_job(job: BatchJob, directive: str) -> None:
    """Raise SubmitError with all values that no batch script may contain.

    directive: the prefix that a line of --extra must have, for example "#SBATCH"; "" if the scheduler has none.
    """
    problems = [*_check_numbers(job), *_check_words(job), *_check_texts(job)]
    for line in job.extra:
        if not directive:
            problems.append(f"--extra {line!r}: a manifest has no directives. Edit the output of --dry-run")
        elif not line.startswith(directive + " "):
            problems.append(f"--extra {line!r} must begin with {directive!r} and a space")
    if problems:
        raise SubmitError("; ".join(problems) + ".")


def _check_numbers(job: BatchJob) -> Iterator[str]:
    for flag, value, least in (
        ("--nodes", job.nodes, 1),
        ("--tasks-per-node", job.tasks_per_node, 1),
        ("--time (in seconds)", job.seconds, 1),
        ("--gpus-per-node", job.gpus, 0),
        ("--cpus-per-task", job.cpus, 0),
    ):
        if not least <= value <= 10**9:
            yield f"{flag} {value} is not a number from {least} up"
    if job.warning and job.warning.seconds >= job.seconds:
        yield (
            f"--signal {job.warning.seconds} s before the end of a job of {job.seconds} s would be sent before the job "
            f"starts"
        )
    if not job.command:
        yield "there is no command. Write it like: hvdkit submit ... -- python train.py"


def _check_words(job: BatchJob) -> Iterator[str]:
    letters = "letters, digits and"
    for flag, value, pattern, allowed in (
        ("--job-name", job.name, _NAME, f"{letters} . _ + -"),
        ("--account", job.account, _WORD, f"{letters} _ . : / @ + , = -"),
        ("--queue", job.queue, _WORD, f"{letters} _ . : / @ + , = -"),
        ("--output", job.output, _PATH, f"{letters} _ . : / @ + , = % -"),
        ("--image", job.image, _WORD, f"{letters} _ . : / @ + , = -"),
        ("--mail", job.mail, _MAIL, "one address like me@site.org"),
        ("--memory", job.memory, _MEMORY, "a number with its unit, like 64G"),
        *(("--dependency", one, _JOB, "the id of a job, like 1234") for one in job.dependencies),
        *(("--module", module, _MODULE, f"{letters} _ . : / @ + = -") for module in job.modules),
    ):
        if value and not pattern.fullmatch(value):
            yield f"{flag} {value!r} is not allowed: {allowed}"
    unknown = set(re.findall("%.?", job.output)) - {"%j", "%x"}
    if unknown:
        yield f"--output {job.output!r}: {', '.join(sorted(unknown))} is unknown; %j is the job's id and %x its name"
    for name in job.environ:
        if not _VARIABLE.fullmatch(name):
            yield f"--env {name!r} is not the name of a variable"


def _check_texts(job: BatchJob) -> Iterator[str]:
    texts = [("the command", word) for word in (*job.hvdrun, *job.command)]
    texts += [(f"--env {name}", value) for name, value in job.environ.items()]
    texts += [("--venv", job.venv), *(("--extra", line) for line in job.extra)]
    for what, text in texts:
        found = _CONTROL.search(text)
        if found:
            yield f"{what} has the control character {found.group()!r} in {text!r}. Put the text into a file"
