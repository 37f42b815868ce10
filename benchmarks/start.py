"""From the command to the first step of two ranks: hvdrun beside plain mpirun, with the same script.

    python -m benchmarks.start

Both take turns, round after round. The table gives the medians over all rounds of the seconds until rank 0 says that it
has taken its first step, and of what hvdrun took more in a round.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.launch.detect.mpi import find_mpi
from hvdkit.launch.plan.mpi import Mpi

AIM_S = 0.5  # that hvdrun may take more
_WORK = "start to first step, 2 ranks"
_SCRIPT = [sys.executable, "-m", "benchmarks.first_step"]


def plan_commands(mpi: Mpi) -> dict[str, list[str]]:
    """The commands to compare, from starting them to the first step of two ranks."""
    flags = ["--oversubscribe", "--bind-to", "none"] if mpi.kind == "open_mpi" else []
    return {
        "mpirun": [mpi.mpirun, *flags, "-np", "2", *_SCRIPT],
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


def measure(mpi: Mpi, *, rounds: int) -> dict[str, list[float]]:
    """Seconds from each command to its first step, in every round."""
    made = plan_commands(mpi)
    times: dict[str, list[float]] = {name: [] for name in made}
    for command in made.values():
        time_start(command)
    for _ in range(rounds):
        for name, command in made.items():
            times[name].append(time_start(command))
    return times


def judge(times: dict[str, list[float]]) -> list[Row]:
    """Rows of the two, the aim for hvdrun with the median of what it took more within a round."""
    ours, plain = times["hvdrun"], times["mpirun"]
    more = statistics.median(mine - other for mine, other in zip(ours, plain, strict=True))
    ratio = statistics.median(mine / other for mine, other in zip(ours, plain, strict=True))
    aim = f"at most {AIM_S:g} s more; here {more:.2f} s"
    return [
        Row(_WORK, "mpirun", statistics.median(plain)),
        Row(_WORK, "hvdrun", statistics.median(ours), ratio, "mpirun", aim, more <= AIM_S),
    ]


def main() -> None:
    """Measure, and print the table."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=5)
    options = parser.parse_args()
    mpi = find_mpi(os.environ, sys.prefix)
    finish(judge(measure(mpi, rounds=options.rounds)), f"mpirun of {mpi.name} {mpi.version}.", options.json)


if __name__ == "__main__":
    main()
