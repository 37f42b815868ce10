"""A scheduler of hvdkit submit in one file: batch scripts for Flux, as its manual flux-batch(1) describes them.

    python flux_scheduler.py train.py | flux batch

A slot of the job is a whole node, on which hvdrun starts the ranks. No Flux has run these scripts yet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob
from hvdkit.tools.submit.scripts import Directives, write_run, write_script


def write_batch(job: BatchJob) -> str:
    """Write the batch script. Raises SubmitError for options that this scheduler does not have."""
    refused = {"--memory": job.memory, "--mail": job.mail, "--requeue": job.requeue, "--signal": job.warning}
    given = [option for option, value in refused.items() if value]
    if given:
        raise SubmitError(f"{', '.join(given)} cannot be requested of Flux. Leave the option out.")
    # Flux says which hosts the job has, but not how many ranks are to run on each.
    here = replace(job, hvdrun=("--slots-per-host", str(job.tasks_per_node), *job.hvdrun))
    run = write_run(here, warned_by="", after=[])
    return write_script(job, "# flux:", "Flux: flux batch FILE runs it.", _directives(job), run)


def _directives(job: BatchJob) -> Iterator[Directives]:
    """Yield for each directive whether it is wanted, then a comment, if any, and its options."""
    yield True, f"--job-name={job.name}"
    yield True, "A slot is a whole node.", f"--nodes={job.nodes} --nslots={job.nodes} --exclusive"
    yield job.gpus, "Of each node.", f"--gpus-per-slot={job.gpus}"
    yield job.cpus, "Of each node.", f"--cores-per-slot={job.cpus * job.tasks_per_node}"
    yield True, f"--time-limit={job.seconds}s"
    yield job.account, f"--bank={job.account}"
    yield job.queue, f"--queue={job.queue}"
    output = job.output.replace("%x", job.name).replace("%j", "{{id}}")
    yield True, "Output and errors together.", f"--output={output}"
    for one in job.dependencies:
        yield True, f"--dependency=afterok:{one}"


def read_state(text: str) -> State | None:
    """Read `flux jobs --no-header --format='{state} {returncode}' ID`."""
    word, _, code = text.strip().partition(" ")
    if word in ("RUN", "CLEANUP"):
        return State("running", word.lower())
    if word != "INACTIVE":
        return State("waiting", word.lower()) if word else None
    if not re.fullmatch(r"-?\d+", code):
        return State("ended", "inactive")
    number = int(code)  # negative: of the signal that ended it; -128: it was cancelled before its start
    return State("ended", "inactive", 1 if number == -128 else 128 - number if number < 0 else number)


FLUX = Scheduler(
    title="Flux",
    write=write_batch,
    submit=("flux", "batch"),
    read_id=first_match(r"(?m)^([\u0192f]\w+)\s*$"),
    ask=lambda job: ("flux", "jobs", "--no-header", "--format={state} {returncode}", job),
    read_state=read_state,
    cancel=lambda job: ("flux", "cancel", job),
)

if __name__ == "__main__":
    sys.stdout.write(FLUX.write(BatchJob(command=("python", *sys.argv[1:]), nodes=2, tasks_per_node=4, seconds=3600)))
