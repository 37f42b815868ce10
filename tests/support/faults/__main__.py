"""Many faults: `PYTHONPATH=tests:tests/support python -m faults --faults 200`, from the root of a clone, as root."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.lab import Lab
from cluster.needs import missing_for_hosts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from faults.plan import Plan, draw_until
from faults.play import Outcome, play
from faults.tally import make_table


def main() -> int:
    """Play plan after plan, and tell what came of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="in all; a dozen a job, fewer on several hosts")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; each next one has the next")
    options = parser.parse_args()
    console, began = Console(), time.monotonic()
    if problem := missing_for_hosts():
        console.print(problem)
        return 2
    outcomes, failed = list[Outcome](), list[Plan]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, _lab() as lab:
        task = progress.add_task("faults", total=options.faults)

        def tell(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.advance(task)

        for plan in draw_until(options.seed, options.faults):
            progress.update(task, description=f"seed {plan.seed}")
            if problem := _what_is_wrong(plan, lab, tell):
                failed.append(plan)
                console.print(f"seed {plan.seed}, {len(plan.faults)} faults: {problem}", markup=False, highlight=False)
                lab.restore()
    console.print(make_table(outcomes))
    minutes = (time.monotonic() - began) / 60
    console.print(f"{len(outcomes)} faults, {minutes:.1f} minutes; jobs that failed: {len(failed)}")
    for plan in failed:
        again = f"--faults {len(plan.faults)} --seed {plan.seed}"
        console.print(f"to play it again: PYTHONPATH=tests:tests/support python -m faults {again}", highlight=False)
    return int(bool(failed))


def _what_is_wrong(plan: Plan, lab: Lab, tell: Callable[[Outcome], None]) -> str:
    """Play a plan; returns what was not as it should be, "" if all was."""
    try:
        play(plan, lab, tell)
    except AssertionError as error:  # told, and the others are played as well
        return str(error)
    return ""


@contextmanager
def _lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        lab = Lab(Path(folder))
        try:
            lab.up()
            yield lab
        finally:
            lab.close()


if __name__ == "__main__":
    raise SystemExit(main())
