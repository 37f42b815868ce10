"""The runs: the script on many ranks, then on one that is given the same batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import CompareError
from hvdkit.startup import plan_variables
from hvdkit.tools.compare.records import RankRecord, read_records
from hvdkit.tools.limited import read_tail, run_limited

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
    asked = {
        "folder": str(folder),
        "ranks": str(others) if others else None,
        "steps": plan.steps,
        "own_rates": plan.own_rates,
    }
    variables = plan_variables({"HVDKIT_COMPARE": json.dumps(asked)}, environ)
    arguments = ["-np", str(ranks), "-H", f"localhost:{ranks}", *plan.flags, "--", *plan.command]
    hvdrun = [sys.executable, "-m", "hvdkit.launch", *arguments]
    code = run_limited(hvdrun, {**environ, **variables}, folder / "output", plan.limit)
    records = read_records(folder)
    steps = [len(record.steps) for record in records] + [0] * (ranks - len(records))
    if min(steps) >= plan.steps:
        return records  # whatever the end of a process says that was cut short
    who, tail = f"{ranks} ranks" if ranks > 1 else "1 rank", _tail(folder / "output")
    if code is None:
        raise CompareError(
            f"The script on {who} took no {plan.steps} steps in {plan.limit:g} s. {tail}"
            f"If it needs longer, say so with --timeout."
        )
    if code and max(steps) >= plan.steps:
        raise CompareError(
            f"Of {who} some took {plan.steps} steps, others {min(steps)} by then. {tail}"
            f"Ranks with models of their own (process sets) cannot be compared with one rank; compare each by itself."
        )
    if code:
        raise CompareError(
            f"The script on {who} ended with exit code {code}. {tail}Try it by itself: hvdrun {' '.join(arguments)}"
        )
    if not min(steps):
        raise CompareError(
            f"The script on {who} ended without a step that could be seen. {tail}"
            f"hvdkit compare sees steps of torch.optim optimizers and of keras.Model.fit, in the process that hvdrun "
            f"starts; give it a training script."
        )
    return records


def _tail(output: Path) -> str:
    lines = read_tail(output, _TAIL)
    return "Its last lines:\n    " + "\n    ".join(lines) + "\n" if lines else ""
