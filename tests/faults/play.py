"""A plan, carried out: the job goes on through all of it, or what is wrong is said."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

from elastic_world_script import reference
from hvdrun_job import alive

from faults.job import Job, started
from faults.plan import KINDS, Fault, Plan

SCRIPT = Path(__file__).parents[1] / "elastic_world_script.py"
_STOP_S = 5.0
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "error": signal.SIGUSR2, "sleep": signal.SIGUSR1}


def play(plan: Plan) -> None:
    """Carry out a plan. Raises AssertionError, with all that the job has said, if it does not end as it should."""
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        finish = Path(folder, "finish")
        command = (str(SCRIPT), "1000000", "0.01", str(plan.commit_every), str(finish))
        with started("-np", str(plan.ranks), "--min-np", "1", command=command) as job:
            job.wait_for(lambda: len(job.pids) == plan.ranks and job.committed(plan.commit_every))
            for fault in plan.faults:
                time.sleep(fault.after_s)
                if "StateLostError" not in job.output:
                    _inflict(job, fault)
            finish.touch()
            output = job.end()
        if job.process.returncode == 1 and "StateLostError" in output:
            return  # the last one that had the state died before the others were given it: a clear end
        assert job.process.returncode == 0, f"{plan}\n{output}"
        result = job.result()
        assert result["alike"], f"{plan}\n{output}"
        off = [abs(mine - wanted) for mine, wanted in zip(result["summary"], reference(result["step"]), strict=True)]
        assert max(off) < 1e-9, f"{plan}\n{off}\n{output}"
    assert shared_memory() <= before, f"{plan}: left in /dev/shm"


def _inflict(job: Job, fault: Fault) -> None:
    """Let it happen to one of the ranks that are there; one that is to end is not the last one that trains."""
    job.wait_for(lambda: len(job.there) > 1)
    there = job.there
    victim = there[int(fault.victim * len(there))]
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "stop":
            os.kill(victim, signal.SIGSTOP)
            time.sleep(_STOP_S)
            os.kill(victim, signal.SIGCONT)
        else:
            os.kill(victim, _SIGNALS[fault.kind])
    if KINDS[fault.kind]:
        job.wait_for(lambda: not alive(victim))


def shared_memory() -> set[str]:
    """What hvdkit has in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("hvdkit-")}
