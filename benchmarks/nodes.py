"""Hosts over a slow link, peers side by side: two at 1 Gbit/s, and four with a long way between them.

    sudo python -m benchmarks.nodes

The hosts are network namespaces of this machine (tests/cluster), with one rank each; all share its cores, so ranks
drive their reductions themselves (HVDKIT_PROGRESS=inline). "wire" is what the model's gradients take over the link and
back at the same time, by themselves; "no communication" what each rank takes alone. Horovod's ranks are jobs of their
own, which have their turn in the same minute, on the same hosts. Times are medians over all steps; of each the slowest
rank counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int

if TYPE_CHECKING:
    from cluster.lab import Lab

TESTS = Path(__file__).resolve().parents[1] / "tests"
MLP, SMALL = "MLP, 8 x 1024x1024", "101 small layers"
_JOB_S = 90.0

Times = dict[str, list[float]]  # by peer, milliseconds of each step


@contextmanager
def hosts(count: int, *, rate: str, delay_ms: float = 0.0) -> Iterator[tuple[Lab, Path]]:
    """So many hosts, and a folder that all of them see. Raises RuntimeError where none can be made."""
    sys.path.insert(0, str(TESTS))
    from cluster.lab import Lab
    from cluster.needs import missing_for_hosts

    if problem := missing_for_hosts():
        raise RuntimeError(problem)
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), count=count)
        try:
            lab.up()
            for name in lab.names:
                lab.limit(name, rate)
                if delay_ms:
                    lab.delay(name, delay_ms)
            yield lab, Path(folder)
        finally:
            lab.close()


def run_job(lab: Lab, folder: Path, kind: str, work: str, steps: int) -> Times:
    """Times of one job, with a rank on each host. kind: see nodes_rank."""
    from cluster.lab import environment

    out = folder / f"{kind}.json"
    out.unlink(missing_ok=True)
    where = ",".join(f"{name}:1" for name in lab.names)
    rank = [sys.executable, "-m", "benchmarks.nodes_rank", kind, work, str(steps), str(out)]
    command = [sys.executable, "-m", "hvdkit.launch", "-np", str(len(lab.names)), "-H", where, *rank]
    quiet = {"HVDKIT_PROGRESS": "inline", "OMP_NUM_THREADS": "1"}
    done = lab.run("node1", command, env=environment(**quiet), timeout=_JOB_S)
    if done.returncode:
        raise RuntimeError(f"{kind} on {len(lab.names)} hosts ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: Times = json.loads(out.read_text())
    return found


def measure(lab: Lab, folder: Path, work: str, *, rounds: int, steps: int) -> Times:
    """The times of all peers, whose jobs take turns."""
    kinds = ["hvdkit", *(["horovod"] if importlib.util.find_spec("horovod") else [])]
    times: Times = {}
    for _ in range(rounds):
        for kind in kinds:
            for peer, found in run_job(lab, folder, kind, work, steps).items():
                times.setdefault(peer, []).extend(found)
    return times


def two_hosts(rounds: int, steps: int) -> list[Row]:
    """The MLP on two hosts at 1 Gbit/s."""
    with hosts(2, rate="1gbit") as (lab, folder):
        times = measure(lab, folder, MLP, rounds=rounds, steps=steps)
    median = {peer: statistics.median(found) for peer, found in times.items()}
    wire, work = median["wire"], "MLP, 2 hosts, 1 Gbit/s"
    rows = [Row(work, "wire", wire / 1000), Row(work, "no communication", median["no communication"] / 1000)]
    for peer in ("hvdkit", "DDP (Gloo)", "Horovod"):
        if peer in median:
            ratio, aim = median[peer] / wire, "at most x1.06" if peer == "hvdkit" else ""
            rows.append(Row(work, peer, median[peer] / 1000, ratio, "wire", aim, ratio <= 1.06 if aim else None))
    narrow = median["hvdkit fp16"]
    faster = median["hvdkit"] / narrow
    rows.append(Row(work, "hvdkit fp16", narrow / 1000, faster, "hvdkit, faster", "at least x1.80", faster >= 1.8))
    if "Horovod fp16" in median:
        than = median["Horovod fp16"] / narrow
        rows.append(
            Row(work, "hvdkit fp16", narrow / 1000, than, "Horovod fp16, faster", "at least x1.40", than >= 1.4)
        )
        rows.append(Row(work, "Horovod fp16", median["Horovod fp16"] / 1000))
    return rows


def four_hosts(rounds: int, steps: int) -> list[Row]:
    """Two hundred small tensors on four hosts, each 1 ms from the switch between them."""
    with hosts(4, rate="1gbit", delay_ms=1) as (lab, folder):
        times = measure(lab, folder, SMALL, rounds=rounds, steps=steps)
    median = {peer: statistics.median(found) for peer, found in times.items()}
    alone, trip, wire = median["no communication"], median["round trip"], median["wire"]
    work, budget = "200 small tensors, 4 hosts, 1 ms to each", 2 * median["round trip"] + median["wire"]
    rows = [Row(work, peer, median[peer] / 1000) for peer in ("no communication", "round trip", "wire")]
    for peer in ("hvdkit", "DDP (Gloo)", "Horovod"):
        if peer in median:
            beyond = median[peer] - alone
            aim = f"{2 * trip + wire:.1f} ms beyond no communication" if peer == "hvdkit" else ""
            to, met = "2 round trips and bytes", beyond <= budget if aim else None
            rows.append(Row(work, peer, median[peer] / 1000, beyond / budget, to, aim, met))
    return rows


def measure_rows(rounds: int = 2, steps: int = 5) -> list[Row]:
    """All rows. Raises RuntimeError where no hosts can be made."""
    return [*two_hosts(rounds, steps), *four_hosts(rounds, steps)]


def main() -> None:
    """Measure, and print the table."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=2)
    parser.add_argument("--steps", type=positive_int, default=5, help="of each peer in a round")
    options = parser.parse_args()
    try:
        rows = measure_rows(options.rounds, options.steps)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    finish(rows, f"hosts of network namespaces on one machine of {os.cpu_count()} cores", options.json)


if __name__ == "__main__":
    main()
