"""A plan, carried out: the job goes on through all of it or ends clearly and then goes on, or what is wrong is said."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.jobs import EVERYWHERE, HVDRUN
from cluster.lab import Lab, wait_until

from faults.harm import Scene, cut_short, harm, inside
from faults.left import check_checkpoints, check_parameters, check_processes, check_shared_memory
from faults.plan import KINDS, Fault, Plan
from faults.run import Run

SCRIPT = Path(__file__).parents[1] / "saved_world_script.py"
_BOUND_S = 10.0
_START_S = 60.0
_DISK_BYTES = 4 << 20


@dataclass(frozen=True)
class Outcome:
    """Of one fault. code: with which the job has ended, None if it went on. took_s: to its next steps, or its end."""

    kind: str
    code: int | None
    took_s: float


def play(plan: Plan, lab: Lab, tell: Callable[[Outcome], None] = lambda outcome: None) -> None:
    """Carry out a plan on healthy hosts. tell: hears of each fault that the job has got over.

    Raises AssertionError, with all that the job has said, if something is not as it should be.
    """
    with _disk(lab, plan.seed) as disk:
        finish = disk.with_suffix(".finish")
        where = ("-np", "3", "-H", EVERYWHERE) if plan.between else ("-np", str(plan.ranks))
        options = ("--verbose", "--elastic", "--min-np", "1", *where)
        command = (*HVDRUN, *options, sys.executable, str(SCRIPT), str(disk), str(plan.commit_every), str(finish))
        faults, damaged = list(plan.faults), set[str]()
        while True:
            run = Run(lab, command)
            try:
                _go_through(run, faults, lab, disk, tell, damaged)
                if not run.ended:
                    finish.touch()
                    run.end(_START_S)
                    assert run.process.returncode == 0, run.output
                    check_parameters(run)
                check_processes(lab, run)
                check_shared_memory(lab, run)
                if run.process.returncode in (0, 75):
                    check_checkpoints(inside(lab, disk), damaged)
                if finish.exists():
                    return
            finally:
                run.kill()


def _go_through(
    run: Run, faults: list[Fault], lab: Lab, disk: Path, tell: Callable[[Outcome], None], damaged: set[str]
) -> None:
    """Take faults from the list until the job ends by one, or there are none. damaged: checkpoints that were."""
    run.wait_for(lambda: run.goes_on(0) or run.ended, _START_S, "the first steps")
    assert not run.ended, run.output
    newest = max((path.name for path in inside(lab, disk).glob("checkpoint-*")), default="")
    assert newest not in damaged or "skipped a damaged checkpoint" in run.output, run.output
    while faults:
        fault = faults.pop(0)
        time.sleep(fault.after_s)
        victim = _choose(run, fault)
        with ExitStack() as undo:
            moment = harm(Scene(lab, run, victim, disk, undo), fault)
            took_s = _get_over(run, fault, moment)
        if not run.ended:
            if fault.kind == "disk":
                _await_checkpoint(run, inside(lab, disk))
            tell(Outcome(fault.kind, None, took_s))
            continue
        code = run.end(1)
        _check_end(run, fault, code)
        tell(Outcome(fault.kind, code, took_s))
        if fault.kind == "truncate" and (path := cut_short(inside(lab, disk))):
            damaged.add(path.name)
        return


def _choose(run: Run, fault: Fault) -> int:
    """A rank's process; that of a rank that is to end is not the last one."""
    least = 2 if KINDS[fault.kind].ends_rank else 1
    run.wait_for(lambda: len(run.began) >= least or run.ended, _START_S, f"{least} ranks that train")
    assert not run.ended, run.output
    began = sorted(run.began.items())
    return began[int(fault.victim * len(began))][1]


def _get_over(run: Run, fault: Fault, moment: float) -> float:
    """Wait until the job goes on or has ended; returns how long that has taken."""

    def is_over() -> bool:
        goes_on = fault.kind not in ("term", "truncate") and run.goes_on(moment)
        return goes_on or run.ended

    run.wait_for(is_over, _BOUND_S - (time.monotonic() - moment), f"an end, or steps, after: {fault}")
    return time.monotonic() - moment


def _await_checkpoint(run: Run, disk: Path) -> None:
    """There is room again, so another one has to come."""
    before = set(disk.glob("checkpoint-*"))
    run.wait_for(lambda: set(disk.glob("checkpoint-*")) - before, _BOUND_S, "a checkpoint, now that there is room")


def _check_end(run: Run, fault: Fault, code: int) -> None:
    """The job has said clearly why it ends."""
    if fault.kind in ("term", "truncate"):
        assert code == 75 and "saved, not finished" in run.output, f"{code} after {fault}\n{run.output}"
        return
    named = re.search(r"hvdrun: ranks? [\d, ]+ on \S+ (was lost|were lost|was killed|failed)", run.output)
    # The last rank that had the state may die before others were given it.
    may_end = KINDS[fault.kind].ends_job or "StateLostError" in run.output
    assert may_end and code and named, f"{code} after {fault}\n{run.output}"


@contextmanager
def _disk(lab: Lab, number: int) -> Iterator[Path]:
    """A small disk of node1."""
    folder = lab.folder / f"disk{number}"
    folder.mkdir()
    made = lab.run("node1", ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", folder])
    assert made.returncode == 0, made.stderr
    try:
        yield folder
    finally:
        wait_until(lambda: lab.run("node1", ["umount", folder]).returncode == 0, 5)
        for path in (folder.with_suffix(".finish"), folder):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
