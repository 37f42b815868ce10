"""From the death of a rank to the next step of the others, and to the first step with another in its place.

    python -m benchmarks.recovery

Three ranks train a small model under `hvdrun --elastic`, and one of them kills itself, rank 0 in every other round. On
two ranks a step of the MLP is timed with a commit after each step, after every tenth, and without any.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int

SHRINK_S, REPLACED_S, COMMIT = 2.0, 4.0, 0.02
_LIMIT_S = 120.0


def run_job(ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What the ranks of an elastic job have noted, one line of JSON each. Raises RuntimeError if the job fails."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        command = [sys.executable, "-m", "hvdkit.launch", "--elastic", "-np", str(ranks), sys.executable]
        done = subprocess.run(
            [*command, "-m", "benchmarks.recovery_rank", folder, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return [json.loads(line) for path in Path(folder).iterdir() for line in path.read_text().splitlines()]


def time_recovery(notes: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds from the kill to the next step of all who are left, and to the first step of all ranks again."""
    killed = next(note["time"] for note in notes if note["what"] == "killed")
    steps = [note for note in notes if note["what"] == "first step" and note["time"] > killed]
    left, again = (max(one["time"] for one in steps if one["ranks"] == ranks) - killed for ranks in (2, 3))
    return left, again


def time_commits(notes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of a step with commits each so often, on rank 0."""
    return {note["every"]: note["median_s"] for note in notes if note["what"] == "commits"}


def judge(recoveries: Sequence[tuple[float, float]], commits: Sequence[dict[str, float]]) -> list[Row]:
    """The rows: medians over rounds."""
    shrunk, replaced = (statistics.median(one[at] for one in recoveries) for at in (0, 1))
    rows = [
        Row("a rank dies", "next step of the others", shrunk, aim="under 2 s", met=shrunk < SHRINK_S),
        Row("a rank dies", "first step with another one", replaced, aim="under 4 s", met=replaced < REPLACED_S),
    ]
    for every, aim in (("0", ""), ("10", ""), ("1", f"at most x{1 + COMMIT:.2f}")):
        ratio = statistics.median(one[every] / one["0"] for one in commits)
        what = {"0": "no commit", "1": "commit after each step", "10": "commit after ten steps"}[every]
        seconds = statistics.median(one[every] for one in commits)
        rows.append(
            Row("MLP, 8 x 1024x1024", what, seconds, ratio, "no commit", aim, ratio <= 1 + COMMIT if aim else None)
        )
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=4)
    options = parser.parse_args()
    recoveries = [time_recovery(run_job(3, "recover", str(at % 2))) for at in range(options.rounds)]
    commits = [time_commits(run_job(2, "commit")) for _ in range(max(1, options.rounds // 2))]
    finish(judge(recoveries, commits), "3 ranks and 2 ranks of one host.", options.json)


if __name__ == "__main__":
    main()
