"""The runs: the script on many ranks, then on one that is given the same batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import CompareError
from hvdkit.startup import plan_variables
from hvdkit.tools.compare.records import RankRecord, read_records

OWN_MODELS = "Ranks with models of their own (process sets) cannot be compared with one rank; compare each by itself."
_TAIL = 15  # lines of a run that failed


@dataclass(frozen=True)
class Plan:
    """What to run, and how.

    flags: more flags of hvdrun. steps: of an optimizer. own_rates: let one rank have the learning rates that the script
    sets there. limit: seconds of a run.
    """

    command: tuple[str, ...]
    ranks: int
    flags: tuple[str, ...] = ()
    steps: int = 5
    own_rates: bool = False
    limit: float = 600.0


def run_script(
    plan: Plan, ranks: int, folder: Path, environ: Mapping[str, str], others: Path | None = None
) -> list[RankRecord]:
    """Run the script on so many ranks and return what they recorded.

    folder: is made, for this run alone. others: the folder of the run whose batches one rank is to take.
    Raises CompareError if it fails, takes too long, or a rank has recorded nothing.
    """
    folder.mkdir()
    settings = {
        "folder": str(folder),
        "ranks": str(others) if others else None,
        "steps": plan.steps,
        "own_rates": plan.own_rates,
    }
    command = [
        sys.executable,
        "-m",
        "hvdkit.launch",
        "-np",
        str(ranks),
        "-H",
        f"localhost:{ranks}",
        *plan.flags,
        "--",
        *plan.command,
    ]
    variables = plan_variables({"HVDKIT_COMPARE": json.dumps(settings)}, environ)
    output = folder / "output"
    with output.open("w") as file:
        job = subprocess.Popen(
            command,
            env={**environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = job.wait(plan.limit)
        except subprocess.TimeoutExpired:
            _end(job)
            raise CompareError(
                f"The script on {_ranks(ranks)} took no {plan.steps} steps in {plan.limit:g} s. {_tail(output)}"
                f"If it needs longer, say so with --timeout."
            ) from None
        except BaseException:
            _end(job)
            raise
    records = read_records(folder)
    steps = [len(record.steps) for record in records]
    if code and plan.steps in steps and min(steps) < plan.steps:
        raise CompareError(
            f"Of {_ranks(ranks)} some took {plan.steps} steps, others {min(steps)} by then. {_tail(output)}{OWN_MODELS}"
        )
    if code:
        raise CompareError(
            f"The script on {_ranks(ranks)} ended with exit code {code}. {_tail(output)}"
            f"Try it by itself: hvdrun {' '.join(command[3:])}"
        )
    if len(records) != ranks or not all(record.steps for record in records):
        raise CompareError(
            f"The script on {_ranks(ranks)} ended without a step that could be seen. {_tail(output)}"
            f"hvdkit compare sees steps of torch.optim optimizers and of keras.Model.fit, in the process that hvdrun "
            f"starts; give it a training script."
        )
    return records


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"


def _end(job: subprocess.Popen[bytes]) -> None:
    # hvdrun ends its ranks when it is asked to.
    job.terminate()
    try:
        job.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()[-_TAIL:]
    return "Its last lines:\n    " + "\n    ".join(lines) + "\n" if lines else ""
