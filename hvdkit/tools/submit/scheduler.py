"""What hvdkit submit has to know of a scheduler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdkit.tools.submit.job import BatchJob


@dataclass(frozen=True)
class State:
    """Where a job stands.

    phase: waiting, running or ended.
    text: in the scheduler's own words.
    code: what an ended job ended with; None if the scheduler does not tell.
    """

    phase: str
    text: str
    code: int | None = None


@dataclass(frozen=True)
class Scheduler:
    """The commands of a scheduler and how to read their answers. Each takes the script from its standard input.

    title: its name in prose. submit: the command line that takes a script.
    read_id: finds the job's id in what `submit` prints; "" if it is not there.
    ask: makes the command line that tells a job's state; read_state reads its output, None if the job is not in it.
    cancel: makes the command line that ends a job.
    read_log: makes the command line that follows the log, where it is no file.
    """

    title: str
    write: Callable[[BatchJob], str]
    submit: tuple[str, ...]
    read_id: Callable[[str], str]
    ask: Callable[[str], tuple[str, ...]]
    read_state: Callable[[str], State | None]
    cancel: Callable[[str], tuple[str, ...]]
    read_log: Callable[[str], tuple[str, ...]] | None = None


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


def read_lsf_state(text: str) -> State | None:
    """Read `bjobs -noheader -o "stat exit_code" ID`."""
    word, _, code = text.strip().partition(" ")
    if word in ("DONE", "EXIT"):
        status = int(code) if code.strip().isdecimal() else None
        return State("ended", word.lower(), 0 if word == "DONE" else status or 1)
    if word in ("RUN", "USUSP", "SSUSP", "UNKWN", "PROV"):
        return State("running", word.lower())
    return State("waiting", word.lower()) if re.fullmatch("[A-Z]+", word) else None


def read_mpijob_state(text: str) -> State | None:
    """Read the status of `kubectl get mpijob NAME -o json`."""
    try:
        conditions = json.loads(text).get("status", {}).get("conditions", [])
    except (ValueError, AttributeError):
        return None
    true = [str(entry.get("type")) for entry in conditions if entry.get("status") == "True"]
    for word, code in (("Failed", 1), ("Succeeded", 0)):
        if word in true:
            return State("ended", word.lower(), code)
    return State("running", "running") if "Running" in true else State("waiting", " ".join(true).lower() or "created")


def first_match(pattern: str) -> Callable[[str], str]:
    """Make a function that finds a pattern's first group in a text; it returns "" if it is not there."""

    def find(text: str) -> str:
        found = re.search(pattern, text)
        return found.group(1) if found else ""

    return find


def find_defaults(on_path: Callable[[str], bool], environ: Mapping[str, str]) -> list[str]:
    """Name the schedulers whose command is on PATH. Kubernetes is never meant unless it is named."""
    qsub = on_path("qsub") and "SGE_ROOT" not in environ  # Grid Engine has a qsub too, with other options
    return [name for name, there in (("slurm", on_path("sbatch")), ("pbs", qsub), ("lsf", on_path("bsub"))) if there]
