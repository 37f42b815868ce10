"""How training scales beyond this machine: the cost model fitted here, checked on what it was not fitted to, and drawn.

    python -m benchmarks.scaling_model --html scaling.html

Measures allreduces of several sizes by several algorithms, and steps of the MLP, on 2, 3 and 4 hosts: network
namespaces on one wire each (as root, on Linux), or else ranks of this host that talk through MPI. Then

1. fits the model's parameters to all of it (scaling_fit.py);
2. checks it on what is held out: one size after the other, and the most hosts; the aim is 15 % for each point;
3. fits the overlap to the step on the fewest hosts, and checks the steps on the others;
4. draws step time and efficiency for 1 to 4096 hosts of one rank each. A faster wire changes the seconds a byte takes,
   by its rate; latency and the cost of a message stay those of this machine's TCP. Beside it Horovod's ring, by the
   same link (64 MiB of gradients at a time), and what others have published.

--save keeps the measurements, --load uses them again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, write_rows
from benchmarks.scaling_drawn import DRAWN, REFERENCES, Drawn, draw_page, horovod, predict_drawn
from benchmarks.scaling_fit import Check, Fitted, Point, check_largest, fit, hold_out, summarise
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.profiling.prediction import Cluster, Work, fit_overlap, predict_step
from hvdkit.tools.bench.report import show_bytes, show_time

ROOT = Path(__file__).parents[1]
_TIMEOUT_S = 150
_AIM = "within 15 % of what was measured"


@dataclass(frozen=True)
class Measurements:
    """What was measured. steps: by number of hosts, the seconds of "compute" and "step". buckets: bytes of each."""

    where: str
    points: list[Point]
    steps: dict[int, dict[str, float]]
    buckets: list[int]
    backward: float
    cores: int


def why_no_lab() -> str:
    """Why there can be no hosts of namespaces here; "" if there can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc", "sshd") if not shutil.which(tool, path=_PATH)]
    if os.geteuid():
        return "not root"
    return f"no {' and '.join(missing)}" if missing else ""


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def measure(counts: Sequence[int], rate: str) -> Measurements:
    """Run scaling_rank on so many hosts, one rank each. Raises RuntimeError with the output of a job that failed."""
    missing = why_no_lab()
    runs = _on_ranks(counts) if missing else _in_lab(counts, rate)
    where = f"ranks of this host through MPI ({missing})" if missing else f"namespaces of this host at {rate}"
    points = [Point(**point) for run in runs for point in run["points"]]
    steps = {run["hosts"]: run["steps"] for run in runs}
    cores = len(os.sched_getaffinity(0))
    return Measurements(f"{where}; {runs[0]['where']}", points, steps, runs[0]["buckets"], runs[0]["backward"], cores)


def _in_lab(counts: Sequence[int], rate: str) -> list[dict[str, Any]]:
    sys.path.append(str(ROOT / "tests"))
    from cluster.lab import Lab

    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        lab, found = Lab(Path(name), count=max(counts)), []
        lab.up()
        try:
            for host in lab.names:
                lab.limit(host, rate)
            for count in counts:
                out = Path(name) / f"{count}.json"
                hosts = ",".join(f"{host}:1" for host in lab.names[:count])
                done = lab.run("node1", [*_command(count), "-H", hosts, *_rank(out)], cwd=ROOT, timeout=_TIMEOUT_S)
                found.append(_read(done, out))
        finally:
            lab.close()
    return found


def _on_ranks(counts: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        for count in counts:
            out = Path(name) / f"{count}.json"
            environ = {**os.environ, "HVDKIT_TRANSPORT": "mpi"}
            command = [*_command(count), *_rank(out)]
            done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S)
            found.append(_read(done, out))
    return found


def _command(count: int) -> list[str]:
    return [sys.executable, "-m", "hvdkit.launch", "-np", str(count)]


def _rank(out: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.scaling_rank", str(out)]


def _read(done: subprocess.CompletedProcess[str], out: Path) -> dict[str, Any]:
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def load(path: Path) -> Measurements:
    """Read what was saved."""
    found = json.loads(path.read_text())
    points = [Point(**one) for one in found.pop("points")]
    return Measurements(points=points, steps={int(hosts): one for hosts, one in found.pop("steps").items()}, **found)


def fit_steps(measured: Measurements, fitted: Fitted) -> tuple[Fitted, list[Check]]:
    """The overlap of the step on the fewest hosts, and the check of all others."""
    fewest, *others = sorted(measured.steps)
    works = {
        hosts: Work(one["compute"], measured.backward * one["compute"], measured.buckets)
        for hosts, one in measured.steps.items()
    }
    overlap = fit_overlap(works[fewest], fitted.here(fewest), fewest, measured.steps[fewest]["step"])
    fitted = replace(fitted, cluster=replace(fitted.cluster, overlap=overlap))
    checks = [
        Check(
            "a step of the MLP",
            hosts,
            f"overlap of {fewest} hosts",
            measured.steps[hosts]["step"],
            predict_step(works[hosts], fitted.here(hosts), hosts).step_s,
        )
        for hosts in others
    ]
    return fitted, checks


def show_fitted(fitted: Fitted) -> str:
    """The model's parameters in words."""
    cluster, link = fitted.cluster, fitted.cluster.link
    rate = f"{8e-9 / link.byte_s:.3g} Gbit/s" if link.byte_s else "no limit"
    return (
        f"latency {1e6 * link.latency_s:.3g} us, {rate}, {1e6 * link.message_s:.3g} us a message, "
        f"{1e6 * cluster.start_s:.3g} us to start an allreduce, {1e6 * fitted.turn_s:.3g} us for a turn on one of "
        f"{fitted.cores} cores; {cluster.overlap:.0%} of what could be hidden is"
    )


def show_checks(checks: Sequence[Check]) -> str:
    """A table of Markdown, with misses marked."""
    lines = ["| what | hosts | fitted to | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for one in checks:
        miss = "" if one.met else ", missed"
        times = f"{show_time(one.measured_s)} | {show_time(one.predicted_s)}"
        lines.append(f"| {one.what} | {one.hosts} | {one.how} | {times} | {one.error:+.0%}{miss} |")
    return "\n".join(lines)


def show_drawn(drawn: Drawn, cluster: Cluster, gigabits: float, hosts: Sequence[int]) -> str:
    """A table of Markdown of one work on one wire."""
    lines = [
        f"{drawn.name} ({drawn.of}) at {gigabits:g} Gbit/s:",
        "| hosts | step | efficiency | Horovod's ring |",
        "|---|---|---|---|",
    ]
    ours = predict_drawn(drawn, cluster, gigabits, hosts)
    theirs = predict_drawn(horovod(drawn), replace(cluster, algorithm="ring"), gigabits, hosts)
    for one, other in zip(ours, theirs, strict=True):
        lines.append(f"| {one.hosts} | {show_time(one.step_s)} | {one.efficiency:.0%} | {other.efficiency:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or load, fit, check and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hosts", type=positive_int, nargs="+", default=[2, 3, 4], help="numbers of hosts to measure on"
    )
    parser.add_argument("--rate", default="1gbit", help="of each host's wire, as tc says it")
    parser.add_argument("--save", type=Path, help="keep the measurements there")
    parser.add_argument("--load", type=Path, help="use these measurements")
    parser.add_argument("--html", type=Path, help="draw the charts there")
    parser.add_argument("--json", type=Path, help="write the checks there as well")
    options = parser.parse_args()
    if min(options.hosts) < 2:
        parser.error(f"--hosts {min(options.hosts)}: nothing goes between hosts where there is one; use 2 or more")
    measured = load(options.load) if options.load else measure(options.hosts, options.rate)
    if options.save:
        options.save.write_text(json.dumps(asdict(measured), indent=1))
    fitted, steps = fit_steps(measured, fit(measured.points, measured.cores))
    cluster = fitted.cluster
    sizes = hold_out(measured.points, measured.cores, lambda one: show_bytes(one.nbytes), "size")
    most = check_largest(measured.points, measured.cores)
    print(f"{measured.where}\n\nFitted to all: {show_fitted(fitted)}.\n")
    for title, checks in (("Sizes held out", sizes), ("The most hosts held out", most), ("Steps", steps)):
        print(f"{title}: {summarise(checks)}\n\n{show_checks(checks)}\n")
    drawn = [replace(DRAWN[0], compute_s=min(one["compute"] for one in measured.steps.values())), *DRAWN[1:]]
    for one in drawn:
        for gigabits in (1, 100):
            print(f"{show_drawn(one, cluster, gigabits, [2, 8, 64, 512, 4096])}\n")
    print("Published:\n" + "\n".join(f"- {one.efficiency:.1%}: {one.text} ({one.source})" for one in REFERENCES))
    if options.html:
        options.html.write_text(draw_page(drawn, cluster, show_fitted(fitted), measured.where))
    if options.json:
        rows = [
            Row(
                f"{one.what}, {one.hosts} hosts, {one.how}",
                "predicted",
                one.predicted_s,
                1 + one.error,
                "measured",
                _AIM,
                one.met,
            )
            for one in (*sizes, *most, *steps)
        ]
        write_rows(options.json, measured.where, rows)


if __name__ == "__main__":
    main()
