"""A batch job as data, and what it may contain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.times import parse_time

# What goes into directives is read by schedulers, each with quoting rules of its own: letters that none of them minds.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+,=-]*", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9_./%][A-Za-z0-9_.:/@+,=%-]*", re.ASCII)
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+=-]*", re.ASCII)
_MAIL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(@[A-Za-z0-9.-]+)?", re.ASCII)
_MEMORY = re.compile(r"[1-9]\d{0,9}[kKmMgGtT][bB]?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SIGNAL = re.compile(r"(?:SIG)?(USR[12])(?:@(\w+))?", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Warning:
    """A signal that is to reach the ranks before the time is up.

    signal: USR1 or USR2. seconds: how long before.
    """

    signal: str
    seconds: int


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What to run, on what, and for how long.

    seconds: the time limit. memory: of a node, like 64G. gpus: of a node. cpus: of a task.
    output: the log; %j stands for the job's id and %x for its name.
    venv: a virtual environment's folder. extra: lines to add to the directives as they are.
    image: of the containers; Kubernetes only.
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

    @property
    def memory_unit(self) -> str:
        """The memory with one letter for its unit, like 64G."""
        return self.memory.rstrip("bB").upper()

    @property
    def tasks(self) -> int:
        """All ranks."""
        return self.nodes * self.tasks_per_node


def parse_warning(text: str) -> Warning:
    """Turn USR1@120 (seconds), USR1@5m or USR1 (a minute) into a Warning; ValueError for anything else."""
    found = _SIGNAL.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r} is not SIGNAL@TIME with USR1 or USR2, which hvdrun passes to the ranks (others end them). "
            "Write it like USR1@120 or USR1@5m."
        )
    name, time = found.groups("60")
    return Warning(name, int(time) if time.isdecimal() and int(time) else parse_time(time))


def parse_variable(text: str) -> tuple[str, str]:
    """Turn NAME=VALUE into both; ValueError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise ValueError(f"{text!r} is not NAME=VALUE. Write it like OMP_NUM_THREADS=4.")
    return name, value


def check_job(job: BatchJob, directive: str) -> None:
    """Raise SubmitError with everything that no batch script may contain.

    directive: what a line of --extra has to begin with, "#SBATCH" for instance; "" where there is no such thing.
    """
    problems = [*_check_numbers(job), *_check_words(job), *_check_texts(job)]
    for line in job.extra:
        if not directive:
            problems.append(f"--extra {line!r}: a manifest has no such lines. Edit what --dry-run prints")
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
        yield f"--signal {job.warning.seconds} s before the end of a job of {job.seconds} s would come at its start"
    if not job.command:
        yield "there is no command. Write it after --, like: -- python train.py"


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
        *(("--module", module, _MODULE, f"{letters} _ . : / @ + = -") for module in job.modules),
    ):
        if value and not pattern.fullmatch(value):
            yield f"{flag} {value!r} is not usable here: {allowed}"
    unknown = set(re.findall("%.?", job.output)) - {"%j", "%x"}
    if unknown:
        yield f"--output {job.output!r}: {', '.join(sorted(unknown))} is unknown; %j is the job's id and %x its name"
    for name in job.environ:
        if not _VARIABLE.fullmatch(name):
            yield f"--env {name!r} is not the name of a variable"


def _check_texts(job: BatchJob) -> Iterator[str]:
    texts = [("the command", word) for word in job.command]
    texts += [(f"--env {name}", value) for name, value in job.environ.items()]
    texts += [("--venv", job.venv), *(("--extra", line) for line in job.extra)]
    for what, text in texts:
        found = _CONTROL.search(text)
        if found:
            yield f"{what} has the control character {found.group()!r} in {text!r}. Put such a text into a file"
