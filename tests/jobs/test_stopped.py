"""An agent or a launcher that a signal has stopped is reported, and killed where the job waits for nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hvdrun_job import read_pids, started, wait_until

from hvdkit.launch.run.stopped import LOOK_S, StoppedProcesses
from hvdkit.launch.state.ranks import End, Ranks


@contextlib.contextmanager
def stopped_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            assert wait_until(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text())
            yield process
        finally:
            process.kill()


def look(ranks: Ranks, times: int, process: int, clock: Callable[[float], object]) -> list[str]:
    said: list[str] = []
    stopped = StoppedProcesses(ranks, said.append, local=False, agents_may_stop_s=0.0)
    for number in range(times):
        clock(100 + number * LOOK_S)
        stopped.check("mpirun", process)
    return said


@pytest.mark.parametrize("ended", [True, False], ids=["at the end", "while all ranks run"])
def test_a_stopped_launcher_is_reported_once_and_killed_at_the_end_only(ended: bool) -> None:
    now = [0.0]
    ranks = Ranks(2, clock=lambda: now[0])
    for rank in range(2):
        ranks.register(rank, "vm")
    if ended:
        ranks.end(1, End(0))

    def set_clock(to: float) -> None:
        now[0] = to

    with stopped_process() as process:
        assert look(ranks, 1, process.pid, set_clock) == []  # it may be about to continue
        first, *later = look(ranks, 40, process.pid, set_clock)
        assert first == (
            f"mpirun was stopped by a signal, and the job cannot end; to continue it: kill -CONT {process.pid}"
        )
        if ended:
            assert later and "mpirun is killed: it has been stopped for 3" in later[0]
            assert process.wait(60) == -signal.SIGKILL
        else:
            assert not later and process.poll() is None


@pytest.mark.ranks
@pytest.mark.parametrize("who", ["agent", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_a_stopped_agent_or_launcher_is_named_with_the_cure(who: str, tmp_path: Path) -> None:
    script = (
        f"go = {str(tmp_path / 'go')!r}\nprint('pid', os.getpid(), flush=True)\n"
        "while not os.path.exists(go): time.sleep(0.02)"
    )
    with started(3, script) as process:
        pids = read_pids(process, 3)
        victim = int(Path(f"/proc/{pids[2]}/stat").read_text().rpartition(")")[2].split()[1])
        if who == "mpirun":
            victim = int(Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(victim, signal.SIGSTOP)
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        os.kill(victim, signal.SIGCONT)
        (tmp_path / "go").touch()
        whose = "mpirun" if who == "mpirun" else r"the agent of rank 2 on \S+"
        assert re.fullmatch(rf"hvdrun: {whose} was stopped by a signal, .*: kill -CONT {victim}\n", line)
        process.communicate(timeout=60)
        assert process.returncode == 0
