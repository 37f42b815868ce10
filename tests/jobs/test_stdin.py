"""hvdrun's stdin reaches rank 0 with its end, whatever it is; the other ranks read nothing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hvdrun_job import HVDRUN, command, environment, hvdrun, lines, wait_until

from hvdkit.launch.agent import wire
from hvdkit.launch.plan.job import AGENT
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.ranks import Ranks
from hvdkit.launch.state.standard_input import StandardInput

DIGEST = "import hashlib; data = sys.stdin.buffer.read(); print(len(data), hashlib.sha256(data).hexdigest())"


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.slow), "pipe", "/dev/null"])
def test_rank_0_reads_stdin_to_its_end(kind: str, tmp_path: Path) -> None:
    data = b"" if kind == "/dev/null" else os.urandom(3 << 20)
    (tmp_path / "data").write_bytes(data)
    with open(os.devnull if kind == "/dev/null" else tmp_path / "data", "rb") as file:
        given: dict[str, Any] = {"input": data} if kind == "pipe" else {"stdin": file}
        done = subprocess.run(command(3, DIGEST), env=environment(), capture_output=True, timeout=100, **given)
    assert done.returncode == 0, done.stderr
    whole, nothing = (f"{len(each)} {hashlib.sha256(each).hexdigest()}" for each in (data, b""))
    assert sorted(lines(done.stdout)) == [f"[0] {whole}", f"[1] {nothing}", f"[2] {nothing}"]


@pytest.mark.ranks
def test_a_script_from_stdin_is_rank_0s_and_the_other_ranks_run_an_empty_one() -> None:
    script = b"import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv, __name__)\n"
    started = [*HVDRUN, "-np", "3", sys.executable, "-", "--lr", "1"]
    done = subprocess.run(started, env=environment(), input=script, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == ["[0] rank 0 of 3 ['-', '--lr', '1'] __main__"]
    failed = subprocess.run(
        started, env=environment(), input=b"raise SystemExit(7)\n", capture_output=True, timeout=100
    )
    assert failed.returncode == 7, "it was the script that ran"


@pytest.mark.ranks
def test_a_script_from_stdin_that_calls_init_ends_with_the_ranks_that_never_will() -> None:
    script = b"import hvdkit.torch as hvd\nhvd.init()\nprint('never')\n"
    done = subprocess.run(
        [*HVDRUN, "-np", "3", sys.executable, "-"],
        env=environment(), input=script, capture_output=True, timeout=100,
    )  # fmt: skip
    report = done.stderr.decode()
    assert done.returncode == 1 and done.stdout == b""
    assert "called by rank 0 on " in report and "not by ranks 1-2 on " in report
    assert "has ended, with exit code 0" in report and "given up because ranks 1-2 on " in report


@pytest.mark.ranks
@pytest.mark.parametrize("ending", ["sys.stdin.close(); os.close(0)", "sys.stdin.readline(); time.sleep(0.3)"])
def test_input_that_rank_0_does_not_read_keeps_no_job_from_its_end(ending: str) -> None:
    source, target = os.pipe()
    with subprocess.Popen(["yes"], stdout=target) as endless:
        os.close(target)
        done = subprocess.run(command(2, ending), env=environment(), stdin=source, capture_output=True, timeout=60)
        os.close(source)
        assert done.returncode == 0, done.stderr
        assert endless.wait(60) == -signal.SIGPIPE


@pytest.mark.slow
@pytest.mark.ranks
def test_a_forgotten_breakpoint_ends_a_batch_job() -> None:
    done = hvdrun(2, "breakpoint()\nprint('never')")
    assert done.returncode == 1 and "bdb.BdbQuit" in done.stderr.decode() and b"never" not in done.stdout


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    outer, inner = pty.openpty()
    try:
        yield outer, inner
    finally:
        os.close(outer)
        os.close(inner)


@pytest.mark.ranks
def test_what_is_typed_reaches_rank_0(terminal: tuple[int, int]) -> None:
    outer, inner = terminal
    process = subprocess.Popen(
        command(2, "for line in sys.stdin: print(repr(line), flush=True)\nprint('end')"),
        env=environment(),
        stdin=inner,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[1] end\n"
        os.write(outer, b"one\n")
        assert process.stdout.readline() == b"[0] 'one\\n'\n"
        os.write(outer, b"\x04")  # Ctrl-D
        assert process.communicate(timeout=60)[0] == b"[0] end\n"
    finally:
        process.kill()
    assert process.returncode == 0


_READ_FROM_THE_BACKGROUND = """
import asyncio, os, signal, sys, time
from hvdkit.launch.state.standard_input import StandardInput

async def read():
    loop = asyncio.get_running_loop()
    got = loop.create_future()
    StandardInput().request(got.set_result)
    await asyncio.wait([got], timeout=0.5)
    print(got.done(), flush=True)
    os.tcsetpgrp(0, os.getpgrp())
    print(await got, flush=True)

signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # to put itself in the foreground
asyncio.run(read())
"""


def test_a_job_in_the_background_of_a_terminal_is_not_stopped_for_reading_it() -> None:
    """The terminal's own process starts it in a process group of its own, as a shell does with `hvdrun ... &`."""
    process, outer = pty.fork()
    if process == 0:
        child = subprocess.Popen([sys.executable, "-c", _READ_FROM_THE_BACKGROUND], preexec_fn=os.setpgrp)
        os._exit(child.wait())
    os.write(outer, b"typed\n")
    seen = b""
    while b"b'typed\\n'\r\n" not in seen and select.select([outer], [], [], 60)[0]:
        seen += os.read(outer, 4096)
    os.close(outer)
    os.waitpid(process, 0)
    assert seen.replace(b"\r", b"") == b"typed\nFalse\nb'typed\\n'\n"


def test_what_a_first_start_has_not_read_is_there_for_the_next() -> None:
    source, target = os.pipe()

    async def read_twice() -> list[bytes]:
        stdin, first, pieces = StandardInput(source), asyncio.Queue[bytes](), asyncio.Queue[bytes]()
        stdin.request(first.put_nowait)  # the job ends while this one waits
        stdin.request(pieces.put_nowait)
        os.write(target, b"piece")
        got = [await pieces.get()]
        os.close(target)
        for _ in range(2):
            stdin.request(pieces.put_nowait)
            got.append(await pieces.get())
        assert first.empty()
        return got

    assert asyncio.run(asyncio.wait_for(read_twice(), 60)) == [b"piece", b"", b""]
    os.close(source)


def test_over_tcp_a_rank_that_does_not_read_is_ended_with_its_input_unread(tmp_path: Path) -> None:
    source, target = os.pipe()

    async def run() -> None:
        ranks = Ranks(1)
        control = ControlServer(ranks, lambda *_: None, stdin=StandardInput(source))
        await control.open(("127.0.0.1",), str(tmp_path))
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", AGENT, "--", "sh", "-c", f"head -c 3 >{tmp_path}/got; exec sleep 60"),
            env={**environment(), **control.variables},
        )
        try:
            await control.changed.wait_until(lambda: bool(control.arrivals), 30)
            control.release({0: {"variables": {}, "cores": {}}})
            writing = asyncio.to_thread(os.write, target, b"x" * (1 << 16))
            await writing
            got = tmp_path / "got"
            await asyncio.to_thread(wait_until, lambda: got.exists() and got.stat().st_size == 3)
            control.send(0, wire.STOP)
            await control.changed.wait_until(lambda: bool(ranks.ended), 30)
            assert ranks.ended[0].ended_by
        finally:
            control.stop()
            await agent.wait()
            await control.close()

    asyncio.run(run())
    assert (tmp_path / "got").read_bytes() == b"xxx"
    os.close(source)
    os.close(target)
