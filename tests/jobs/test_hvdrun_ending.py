"""How hvdrun ends: when it is asked to, whatever it is doing; and with nothing left of what ranks have started."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hvdrun_job import (
    HVDRUN,
    RANK,
    SLEEP,
    alive,
    command,
    descendants,
    environment,
    hvdrun,
    lines,
    read_pids,
    started,
    wait_until,
)
from refused import refused

from hvdkit.launch.agent import wire
from hvdkit.launch.plan.job import AGENT, Job, Launch
from hvdkit.launch.run.output import Interruption, Output
from hvdkit.launch.run.runner import Runner
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.ranks import End, Ranks


@pytest.mark.ranks
@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_rank_leaves_running_in_another_process_group_is_ended_with_it(code: int) -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '64'], preexec_fn=os.setpgrp, stdout=-3)"
    done = hvdrun(2, f"{script}\nprint(child.pid, flush=True)\nif rank == 1: sys.exit({code})")
    assert done.returncode == code
    pids = [int(line.split()[1]) for line in lines(done.stdout)]
    assert len(pids) == 2 and wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.ranks
def test_ctrl_c_while_hvdrun_waits_for_hosts_prints_no_traceback(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    hosts.chmod(0o700)
    argv = [*HVDRUN, "-np", "2", "--elastic", "--host-discovery-script", str(hosts), "true"]
    # Where pytest itself runs in a shell's background, children would ignore it as pytest does.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        argv, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=heed
    )
    try:
        assert wait_until((tmp_path / "asked").exists)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in errors


INTERRUPTED_IMPORT = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run where it is ignored

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from hvdkit.launch.cli.hvdrun import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("hvdkit.launch.cli.options", "hvdrun: Ctrl-C: nothing was started."),
        ("hvdkit.launch.start", "hvdrun: Ctrl-C: nothing was started."),
        ("asyncio", "hvdrun: Ctrl-C."),
    ],
)
def test_ctrl_c_during_an_import_ends_hvdrun_with_one_line(module: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "started"
    argv = [sys.executable, "-c", INTERRUPTED_IMPORT, module, "-np", "3", "touch", str(file)]
    done = subprocess.run(argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (130, [line])
    assert not file.exists()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_job_whose_output_nobody_reads_ends_when_it_is_asked_to(number: signal.Signals, code: int) -> None:
    """Like the output in a pager, or on a terminal after Ctrl-S."""
    source, target = os.pipe()
    process = subprocess.Popen(
        command(2, "while True: print('x' * 1000)"),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=target,
        stderr=subprocess.PIPE,
    )
    os.close(target)
    try:
        assert wait_until(lambda: waits_to_write(process.pid))
        processes = descendants(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
        os.close(source)
    assert process.returncode == code and f"{'Ctrl-C' if number == 2 else 'SIGTERM'}: ended 2 ranks." in errors.decode()
    assert wait_until(lambda: not any(map(alive, processes)))


INTERRUPTED = """
import hvdkit.torch as hvd
import torch
hvd.init()
print('pid', os.getpid(), flush=True)
try:
    if rank == 0: time.sleep(60)
    hvd.allreduce(torch.ones(3))
except KeyboardInterrupt:
    print('interrupted', flush=True)
    raise
finally:
    time.sleep(0.2 * rank)
    print('finally', flush=True)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)])
def test_ctrl_c_is_a_keyboard_interrupt_in_every_rank_also_in_a_collective(transport: str) -> None:
    with started(3, INTERRUPTED, "--transport", transport) as process:
        pids = read_pids(process, 3)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    words = sorted(f"[{rank}] {word}" for rank in range(3) for word in ("finally", "interrupted"))
    assert sorted(lines(out)) == words
    assert lines(errors)[-1] == "hvdrun: Ctrl-C: ended 3 ranks."
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_do_not_heed_ctrl_c_are_ended_too() -> None:
    """A rank in the C code of MPI heeds it only when that returns."""
    with started(3, f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLEEP}") as process:
        pids = read_pids(process, 3)
        for _ in range(2):  # the second one gives them no time
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)  # two at once are one
        process.communicate(timeout=100)
    assert process.returncode == 130 and not any(alive(pid) for pid in pids.values())


@pytest.mark.ranks
def test_ctrl_c_reaches_what_a_shell_has_started() -> None:
    script = "try:\n    print('pid', os.getpid(), flush=True); time.sleep(60)\nfinally: print('finally', flush=True)"
    argv = [*HVDRUN, "-np", "2", "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", RANK + script]
    with subprocess.Popen(
        argv, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 130 and sorted(lines(out)) == ["[0] finally", "[1] finally"]


def test_only_a_second_signal_takes_the_time_to_end_from_the_ranks() -> None:
    for signals, hurried in {
        (signal.SIGINT,): False,
        (signal.SIGTERM, signal.SIGTERM): False,  # schedulers send it more than once
        (signal.SIGINT, signal.SIGINT): True,
        (signal.SIGINT, signal.SIGTERM): True,
        (signal.SIGTERM, signal.SIGINT): True,
        (signal.SIGHUP,): True,
    }.items():
        interruption = Interruption(Output())
        for number in signals:
            interruption._record(number)
        assert (interruption.number, interruption.hurried) == (signals[0], hurried)


def waits_to_write(process: int) -> bool:
    """Whether the kernel has a process wait in a write to a pipe."""
    return "pipe_write" in Path(f"/proc/{process}/wchan").read_text() or _in_write_call(process)


def _in_write_call(process: int) -> bool:
    """The same where wchan is hidden. The system call write(2) is 1 on x86-64, and 64 elsewhere."""
    words = Path(f"/proc/{process}/syscall").read_text().split()
    return words[:2] in (["1", "0x1"], ["64", "0x1"])


def test_a_launcher_that_cannot_be_started_is_an_error_of_hvdruns(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output()
    job = Job(command=(), ranks=1, environ={})
    runner = Runner(lambda control, _: Launch(("/no/such/mpirun",), control), job, output, Interruption(output))
    with refused("launcher-not-started", names=["/no/such/mpirun", "No such file"]):
        asyncio.run(runner.run())


def test_a_reader_that_has_left_is_the_cause_unless_a_rank_has_failed() -> None:
    output = Output()
    job = Job(command=(), ranks=2, environ={})
    runner: Any = Runner(lambda control, _: Launch(("mpirun",), control), job, output, Interruption(output))
    for rank in (0, 1):
        runner.ranks.register(rank, "node1")
    output.broken = BrokenPipeError()
    runner.ranks.lose(0)  # its agent did not report the end that hvdrun asked for
    assert runner._conclude(-signal.SIGTERM).code == 141
    runner.ranks.end(1, End(code=3))
    result = runner._conclude(-signal.SIGTERM)
    assert result.code == 3 and "rank 1 on node1 failed with exit code 3" in result.lines[0]


async def start_agent_after(frames: Mapping[bytes, bytes], folder: Path, script: str) -> End:
    """Start the agent of one rank, which finds these frames before its start order; returns how the rank ended."""
    ranks = Ranks(1)
    control = ControlServer(ranks, lambda *_: None)
    await control.open((), str(folder))
    try:
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", AGENT, "--", sys.executable, "-c", script),
            env={**os.environ, **control.variables},
        )
        while not control.arrivals:
            control.changed.clear()
            await control.changed.wait()
        for kind, payload in frames.items():
            control.send(0, kind, payload)
        control.release({0: {"variables": {}, "cores": {}}})
        while not ranks.ended:
            control.changed.clear()
            await control.changed.wait()
        control.stop()
        await agent.wait()
        return ranks.ended[0]
    finally:
        await control.close()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_script_that_comes_before_its_start_reaches_it(number: signal.Signals, tmp_path: Path) -> None:
    frames = {wire.SIGNAL: str(int(number)).encode()}
    end = asyncio.run(start_agent_after(frames, tmp_path, "import time; time.sleep(50)"))
    assert end.signal == number and not end.ended_by


@pytest.mark.ranks
def test_a_log_that_cannot_be_written_is_told_and_the_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rank.1.log").symlink_to("/dev/full")
    done = hvdrun(2, "print('one'); print('two', file=sys.stderr)", "--output-filename", str(tmp_path))
    assert (done.returncode, sorted(lines(done.stdout))) == (0, ["[0] one", "[1] one"])
    told = "[1] hvdkit: its log is incomplete from here on: No space left on device"
    assert sorted(lines(done.stderr)) == sorted(["[0] two", "[1] two", told])
    assert sorted(lines((tmp_path / "rank.0.log").read_bytes())) == ["one", "two"]


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_job_of_run_ends_with_the_process_that_waits_for_it(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, hvdkit\n"
        "def train(folder):\n"
        "    open(f'{folder}/pid.{os.getpid()}', 'w').close()\n"
        "    time.sleep(50)\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        f"        hvdkit.run(train, ({str(tmp_path)!r},), np=2)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("pid.*"))) == 2)
        process.send_signal(number)  # to this process alone
        out, errors = process.communicate(timeout=100)  # until hvdrun has ended too, whose stderr it is
    finally:
        process.kill()
    if number == signal.SIGINT:
        assert lines(out) == ["interrupted"] and "hvdrun: Ctrl-C: ended 2 ranks." in lines(errors)
    else:
        assert not out and "hvdrun: SIGHUP: ended 2 ranks." in lines(errors)
    assert not any(alive(int(file.suffix[1:])) for file in tmp_path.glob("pid.*"))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("tool", ["bench", "compare", "profile"])
def test_ranks_that_a_command_has_started_end_with_it_when_it_is_killed(tmp_path: Path, tool: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, time\nopen(f'{tmp_path}/pid.{{os.getpid()}}', 'w').close()\nwhile True: time.sleep(1)\n"
    )
    what = ["allreduce"] if tool == "bench" else []
    rest = [] if tool == "bench" else ["--", sys.executable, str(script)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdkit", tool, *what, "-np", "2", *rest],
        env=environment(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ranks() -> set[int]:
        if tool != "bench":
            return {int(file.suffix[1:]) for file in tmp_path.glob("pid.*")}
        lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(process.pid)}
        started = (pid for pid, line in lines.items() if line.exists() and b"bench.worker" in line.read_bytes())
        return {pid for pid in started if b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()}

    try:
        assert wait_until(lambda: len(ranks()) >= 2, 60)
        everything = descendants(process.pid) | ranks()
    finally:
        process.kill()
        process.wait()
    assert wait_until(lambda: not any(map(alive, everything)), 40)
