"""Many faults: `PYTHONPATH=tests python -m faults --faults 200`, from the root of the repository."""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.progress import track

from faults.plan import draw
from faults.play import play

_A_JOB = 8


def main() -> int:
    """Play seed after seed, and tell which failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="in all, eight a job")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; each next one has the next")
    options = parser.parse_args()
    console, began = Console(), time.monotonic()
    seeds = range(options.seed, options.seed + -(-options.faults // _A_JOB))
    failed = [seed for seed in track(seeds, console=console) if not _goes_well(seed, console)]
    minutes, faults = (time.monotonic() - began) / 60, _A_JOB * len(seeds)
    console.print(f"{faults} faults in {len(seeds)} jobs, {minutes:.1f} minutes; failed: {failed or 'none'}")
    return int(bool(failed))


def _goes_well(seed: int, console: Console) -> bool:
    try:
        play(draw(seed, _A_JOB))
    except AssertionError as error:  # told, and the others are played as well
        console.print(f"seed {seed}: {error}", markup=False, highlight=False)
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
