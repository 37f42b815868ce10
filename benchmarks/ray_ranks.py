"""Ranks on Ray: how long run() takes beside its function, and a death of an actor until training goes on.

    python -m benchmarks.ray_ranks --rounds 5

Starts Ray on this machine if RAY_ADDRESS names no cluster. Needs 2 CPUs of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import hvdkit_ray
from hvdkit.launch.cli.numbers import positive_int

_LOOK_S = 0.01


def nothing() -> None:
    """Connect the ranks, and return."""
    import hvdkit.torch as hvd

    hvd.init()


def train(folder: str) -> None:
    """Write (time, ranks, rank, process) in each step until the file `stop` is there."""
    import torch

    import hvdkit.torch as hvd

    @hvd.elastic.run
    def run_steps(state: Any) -> None:
        stop = False
        while not stop:
            hvd.allreduce(torch.ones(1), name="one")
            with Path(folder, "steps").open("a") as file:
                print(time.time(), hvd.size(), hvd.rank(), os.getpid(), file=file)
            time.sleep(_LOOK_S)
            stop = hvd.broadcast_object(Path(folder, "stop").exists(), 0)
            state.commit()

    hvd.init()
    run_steps(hvd.elastic.TorchState())


def measure_recovery() -> tuple[float, float]:
    """Seconds from the death of rank 1 of 2 to a step of the other alone, and to a step of two ranks."""
    with tempfile.TemporaryDirectory() as folder:

        def steps() -> list[list[str]]:
            path = Path(folder, "steps")
            return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

        def wait_for(ranks: str, after: float) -> float:
            while True:
                found = [float(step[0]) for step in steps() if len(step) == 4 and step[1] == ranks]
                if any(when > after for when in found):
                    return min(when for when in found if when > after)
                time.sleep(_LOOK_S)

        job = threading.Thread(
            target=hvdkit_ray.run, args=(train, [folder]), kwargs={"min_workers": 1, "max_workers": 2}
        )
        job.start()
        wait_for("2", 0)
        pid = next(int(step[3]) for step in steps() if step[1:3] == ["2", "1"])
        died = time.time()
        os.kill(pid, signal.SIGKILL)
        alone = wait_for("1", died)
        both = wait_for("2", alone)
        Path(folder, "stop").touch()
        job.join()
    return alone - died, both - died


def main(rounds: int) -> None:
    """Print the medians."""
    hvdkit_ray.run(nothing, num_workers=2)  # Ray and the files of torch are there then
    starts = []
    for _ in range(rounds):
        began = time.perf_counter()
        hvdkit_ray.run(nothing, num_workers=2)
        starts.append(time.perf_counter() - began)
    recoveries = [measure_recovery() for _ in range(rounds)]
    print(f"median of {rounds} rounds, 2 ranks")
    print(f"run() of a function that connects the ranks: {median(starts):.1f} s")
    print(f"an actor was killed: {median(alone for alone, _ in recoveries):.1f} s until the other one trains")
    print(f"                     {median(both for _, both in recoveries):.1f} s until there are two again")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=5)
    main(parser.parse_args().rounds)
