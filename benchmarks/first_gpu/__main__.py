"""Everything that hvdkit wants to know from the first GPU that it runs on, in one run of at most nine minutes.

    python -m benchmarks.first_gpu                     on a machine with a GPU
    python -m benchmarks.first_gpu --device cpu        a rehearsal on any machine, with Gloo in place of NCCL
    python -m benchmarks.first_gpu --prepare wheels --python 3.12      on a machine with a network, before
    python3 -m benchmarks.first_gpu --wheels wheels    on a machine without one: installs from the folder first

Stages run one after the other, each with a time limit of its own; a stage that fails or is too slow does not end the
run. The report, in Markdown and JSON, is written anew after each stage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.first_gpu.report import write_report
from benchmarks.first_gpu.run import Outcome, run_stage
from benchmarks.first_gpu.stages import plan_stages
from benchmarks.first_gpu.wheels import install_wheels, prepare_wheels

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run, and return the exit code: 0 if every stage was done or could not be run here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal (default: cuda)")
    parser.add_argument("--only", metavar="STAGE,...", help="these stages alone")
    parser.add_argument("--list", action="store_true", help="list the stages, and end")
    parser.add_argument("--seconds", type=float, default=540.0, metavar="S", help="for all stages (default: 540)")
    parser.add_argument("--output", type=Path, default=Path("first_gpu"), metavar="DIR", help="for report and results")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install hvdkit and the tests' packages from there")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="download these packages to DIR, and end")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="with --prepare: the GPU machine's Python")
    options = parser.parse_args()
    if options.prepare:
        return prepare_wheels(options.prepare, options.python, _ROOT)
    stages = plan_stages(options.device, _count_gpus())
    if options.list:
        print("\n".join(f"{stage.name:<18}{stage.about}, {stage.limit_s:.0f} s at most" for stage in stages))
        print(f"Together {options.seconds:.0f} s at most (--seconds); the report names what was left out.")
        return 0
    chosen = options.only.split(",") if options.only else [stage.name for stage in stages]
    unknown = sorted(set(chosen) - {stage.name for stage in stages})
    if unknown:
        parser.error(f"there is no stage {unknown[0]}; see --list")
    deadline_s = time.monotonic() + options.seconds
    options.output.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    if options.wheels:
        python = install_wheels(options.wheels, options.output.resolve() / "venv")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))}
    if options.device == "cpu":
        environ["HVDKIT_DEVICE_TRANSPORT"] = "torch"  # the code that reduces tensors of a GPU, over Gloo
    outcomes: list[Outcome] = []
    for stage in stages:
        if stage.name in chosen:
            print(f"{stage.name}: {stage.about} ...", flush=True)
            left_s = deadline_s - time.monotonic()
            outcomes.append(run_stage(stage, python, environ, options.output.resolve(), left_s))
            print(f"  {outcomes[-1].state} {outcomes[-1].why}".rstrip() + f", {outcomes[-1].seconds:.0f} s", flush=True)
            _write(options.output, options.device, outcomes)
    print(f"The report is {options.output / 'report.md'}.")
    return int(any(outcome.state in ("failed", "too slow", "skipped") for outcome in outcomes))


def _write(folder: Path, device: str, outcomes: Sequence[Outcome]) -> None:
    (folder / "report.md").write_text(write_report(device, outcomes))
    document = {"device": device, "stages": [asdict(outcome) for outcome in outcomes]}
    (folder / "report.json").write_text(json.dumps(document, indent=1))


def _count_gpus() -> int:
    """Count the GPUs of this machine by nvidia-smi; 0 without it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
