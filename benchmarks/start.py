"""From the command to the first step of two ranks: hvdrun beside plain mpirun, with the same script.

    python -m benchmarks.start

Both take turns, round after round. The table gives the medians over all rounds of the seconds until rank 0 says that it
has taken its first step, and of what hvdrun took more in a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hvdkit.launch.mpi import find_mpi

AIM_S = 0.5  # that hvdrun may take more
_SCRIPT = [sys.executable, "-m", "benchmarks.first_step"]


def commands() -> dict[str, list[str]]:
    """The commands to compare. Raises LaunchError where there is no MPI."""
    mpirun = find_mpi(os.environ, sys.prefix)
    flags = ["--oversubscribe", "--bind-to", "none"] if mpirun.kind == "open_mpi" else []
    return {
        "mpirun": [mpirun.mpirun, *flags, "-np", "2", *_SCRIPT],
        "hvdrun": [sys.executable, "-m", "hvdkit.launch", "-np", "2", *_SCRIPT],
    }


def time_start(command: list[str]) -> float:
    """Seconds until rank 0 has taken its first step. Raises RuntimeError, with what was printed, if it never does."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **root}
    ) as job:
        assert job.stdout is not None
        said = []
        for line in job.stdout:
            said.append(line)
            if line.rstrip().endswith("stepped"):
                took = time.perf_counter() - began
                job.stdout.read()
                return took
    raise RuntimeError(f"{' '.join(command)} took no step and ended with {job.returncode}:\n{''.join(said)}")


def measure(*, rounds: int) -> dict[str, list[float]]:
    """Seconds from each command to its first step, in every round."""
    made = commands()
    times: dict[str, list[float]] = {name: [] for name in made}
    for command in made.values():
        time_start(command)
    for _ in range(rounds):
        for name, command in made.items():
            times[name].append(time_start(command))
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, float]:
    """The median seconds of each, and "more": the median of what hvdrun took more in a round."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    more = [ours - plain for ours, plain in zip(times["hvdrun"], times["mpirun"], strict=True)]
    return {**medians, "more": statistics.median(more)}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    options = parser.parse_args()
    summary = summarise(measure(rounds=options.rounds))
    print("| to the first step | mpirun | hvdrun | more | aim |\n|---|---|---|---|---|")
    print("| 2 ranks | " + " | ".join(f"{seconds:.2f} s" for seconds in summary.values()) + f" | {AIM_S:.2f} s more |")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
