"""hvdkit stacks: what all ranks of a running job are doing, asked from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hvdrun_job import SLEEP, alive, descendants, environment, read_pids, started, wait_until
from refused import refused

from hvdkit import cli
from hvdkit.launch.agent.stacks import StackCollector
from hvdkit.launch.introspect.stack_report import (
    Frame,
    ProcessStack,
    format_report,
    parse_dump,
    read_answer,
    read_processes,
)
from hvdkit.launch.state.runtime_dir import RuntimeDirectory, find_jobs
from hvdkit.stacks import offer_all_stacks, offer_stacks
from hvdkit.tools import jobs

ALL = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/a/threading.py", line 320 in wait
  File "/a/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000004 (most recent call first):
  File "/a/stacks.py", line 44 in answer

Thread 0x00007f0000000002 [named] (most recent call first):
  <no Python frame>

Thread 0x00007f0000000003 (most recent call first):
  File "/a/in a "folder"/train.py", line 7 in step
  File "/a/train.py", line ??? in <module>
"""
MAIN = """\
Stack (most recent call first):
  File "/a/train.py", line 9 in <module>
"""


@pytest.mark.parametrize("text", [ALL, MAIN + ALL, ALL + MAIN])
def test_the_main_thread_comes_first_and_its_innermost_call_last(text: str) -> None:
    main, named, other = parse_dump(text)
    assert main == (Frame("/a/train.py", 0, "<module>"), Frame('/a/in a "folder"/train.py', 7, "step"))
    assert named == ()
    assert other == (Frame("/a/threading.py", 320, "wait"),)


def test_the_main_thread_may_be_all_that_is_known() -> None:
    assert parse_dump(MAIN) == [(Frame("/a/train.py", 9, "<module>"),)]


@contextlib.contextmanager
def offering(code: str, *, to: Callable[[], None] = offer_all_stacks) -> Iterator[subprocess.Popen[bytes]]:
    """A process that offers its stacks and then runs the code, which prints a line; in a session of its own."""
    offer = f"from hvdkit.stacks import {to.__name__}\n{to.__name__}()\n"
    environ = {**environment(), "HVDKIT_AGENT": "1"}
    argv = [sys.executable, "-c", offer + code]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


def take(process: subprocess.Popen[bytes]) -> list[ProcessStack]:
    """What it answers."""
    taker = StackCollector(process.pid)
    while (found := taker.collect()) is None:
        time.sleep(0.02)
    return read_processes(0, "n1", found)


# What they do is over so soon that it changes while somebody looks.
WORKS = """
import sys, threading, time, traceback
def work():
    while True:
        for frame in sys._current_frames().values():
            traceback.format_stack(frame)
        threading.Thread(target=time.sleep, args=[0.001]).start()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
def wait():
    print(flush=True)
    time.sleep(100)
wait()
"""


def test_a_process_that_works_in_many_threads_is_asked_and_goes_on() -> None:
    with offering(WORKS) as process:
        for _ in range(40):
            (doing,) = take(process)
            assert process.poll() is None
            assert doing.stacks and doing.stacks[0][-1].function == "wait"
            assert sum("work" in [frame.function for frame in stack] for stack in doing.stacks) == 2


# As MPI_Finalize waits for other ranks: in C, when Python has ended.
ENDS = """
import ctypes
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
print(flush=True)
"""


def caught(pid: int) -> int:
    """The signals that a process has a handler for, a bit each."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16)


def test_a_process_that_python_has_left_is_asked_and_goes_on() -> None:
    with offering(ENDS) as process:
        assert wait_until(lambda: not caught(process.pid) >> (signal.SIGRTMIN + 12 - 1) & 1)
        (doing,) = take(process)
        assert process.poll() is None
        assert not doing.stacks and "does not answer" in doing.why


# Locked twice it waits for ever, and keeps Python's lock.
HOLDS = """
import ctypes
lock = ctypes.create_string_buffer(128)
def hold():
    print(flush=True)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
hold()
"""


@pytest.mark.parametrize(
    ("code", "to"), [(HOLDS, offer_all_stacks), (WORKS, offer_stacks)], ids=["holds Python's lock", "before init()"]
)
def test_the_main_thread_answers_where_others_cannot(code: str, to: Callable[[], None]) -> None:
    with offering(code, to=to) as process:
        time.sleep(0.2)
        (doing,) = take(process)
        assert process.poll() is None
        assert [stack[-1].function for stack in doing.stacks] == ["hold" if code is HOLDS else "wait"]


def test_ranks_that_do_the_same_are_together_and_the_odd_ones_first() -> None:
    wait, work = (Frame("/no/wait.py", 1, "wait"),), (Frame("/no/work.py", 2, "work"),)
    doings = [
        ProcessStack(rank, "n1" if rank < 4 else "n2", "", (wait, work) if rank == 5 else (wait,)) for rank in range(6)
    ]
    doings[2] = ProcessStack(2, "n1", "", (work,))
    doings.append(ProcessStack(5, "n2", "pid 77", (wait,)))
    report = format_report(doings)
    heads = [line for line in report.splitlines() if line.startswith(("rank", "  another"))]
    assert heads == [
        "rank 2 on n1:",
        "ranks 0-1, 3 on n1; 4-5, 5 (pid 77) on n2:",
        "  another thread of rank 5 on n2:",
    ]


def test_ranks_that_wait_in_hvdkit_do_the_same_wherever_they_look() -> None:
    inside = str(Path(cli.__file__).parent / "engine" / "named.py")
    call = Frame("/no/train.py", 1, "step")
    stacks = [(call, Frame(inside, 1, "do")), (call, Frame(inside, 2, "do"), Frame("/no/select.py", 3, "poll"))]
    report = format_report([ProcessStack(rank, "n1", "", (stack,)) for rank, stack in enumerate(stacks)])
    assert report.startswith("ranks 0-1 on n1 (inside hvdkit as rank 0 on n1 does):") and "select.py" not in report


def process(**changes: Any) -> dict[str, Any]:
    return {"pid": 9, "state": "S", "command": "cat", "stacks": "", "asked": False, **changes}


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (None, "its agent does not answer"),
        ([process()], "no stack, as it has not imported hvdkit (pid 9, state S): cat"),
        ([process(state="T")], "stopped by a signal (pid 9"),
        ([process(state="D", asked=True)], "waiting for a file system"),
        ([process(asked=True)], "it does not answer (pid 9"),
        ([process(state="")], "its process has ended"),
    ],
)
def test_a_rank_without_stacks_is_explained(processes: Any, words: str) -> None:
    (doing,) = read_answer({"job": {"hosts": {"3": "n1"}}, "ranks": {"3": processes}})
    assert words in doing.why and format_report([doing]).startswith("rank 3 on n1: ")


HANGS = """
import hvdkit.torch as hvd, torch
from mpi4py import MPI
hvd.init(stall_check_s=1)
print("pid", os.getpid(), flush=True)
def looks_at_the_sky():
    MPI.COMM_WORLD.Recv(bytearray(1), source=0, tag=99)
if hvd.rank() == 1:
    looks_at_the_sky()
def step():
    hvd.allreduce(torch.ones(3), name="gradients")
step()
"""


def ask(job: str, hvdrun: subprocess.Popen[bytes], *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", "stacks", job, *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        hvdrun.terminate()
        raise AssertionError(f"{done.stderr}\nhvdrun: {hvdrun.communicate(timeout=20)}")
    return done.stdout


@pytest.mark.ranks
def test_a_hang_is_shown_and_goes_on() -> None:
    with started(3, HANGS) as hvdrun:
        job = str(hvdrun.pid)
        assert hvdrun.stderr is not None
        pids = read_pids(hvdrun, 3)
        told = ""
        while "hvdkit stacks" not in told:  # the report of the stall says what to type
            told = hvdrun.stderr.readline().decode()
            assert told
        assert f"`hvdkit stacks {job}`" in told
        for _ in range(2):
            odd, same = ask(job, hvdrun).partition("ranks 0, 2 on ")[::2]
            assert "rank 1 on " in odd and "in looks_at_the_sky" in odd and "in step" not in odd
            assert "in step" in same and "in allreduce" in same
        document = json.loads(ask(job, hvdrun, "--json"))
        functions = [frame["function"] for frame in document["processes"][1]["stacks"][0]]
        assert document["job"]["size"] == 3 and "looks_at_the_sky" in functions
        os.kill(pids[1], signal.SIGSTOP)
        assert f"stopped by a signal (pid {pids[1]}, state T)" in ask(job, hvdrun)
        os.kill(pids[1], signal.SIGCONT)
        assert hvdrun.poll() is None


@pytest.mark.ranks
def test_what_a_killed_job_left_is_gone_at_the_next_start() -> None:
    with started(2, SLEEP) as hvdrun:
        read_pids(hvdrun, 2)
        job = str(hvdrun.pid)
        left = Path(find_jobs()[job])
        # hvdrun last, so that no other one that is still there finds it gone and cleans up.
        everything = [*descendants(hvdrun.pid), hvdrun.pid]
        for pid in everything:
            os.kill(pid, signal.SIGSTOP)
        for pid in everything:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not any(map(alive, everything)))
        assert left.exists() and job not in find_jobs()
        folder = RuntimeDirectory()
        assert not left.exists() and folder.name in os.listdir(left.parent)
        folder.close()
        assert folder.name not in os.listdir(left.parent)


def test_the_job_that_is_meant_is_found_or_all_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "query_job", lambda folder, what: {"job": {"size": 3, "command": f"{what} {folder}"}})
    one, two = {"1": "/one"}, {"1": "/one", "2": "/two"}
    assert jobs.select_job("hvdkit stacks", None, one) == jobs.select_job("hvdkit stacks", "1", two) == "/one"
    for name, running, code, seen in (
        (None, {}, "no-job-runs", "this host"),
        (None, two, "job-not-selected", "several jobs"),
        ("3", two, "job-not-selected", "no job 3"),
    ):
        names = [f"hvdkit stacks {each}    3 ranks of job {folder}" for each, folder in running.items()]
        with refused(code, names=[seen, *names]):
            jobs.select_job("hvdkit stacks", name, running)
