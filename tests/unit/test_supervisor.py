"""The attempts of an elastic job when hvdrun is asked to end it, with runners that start nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.elastic.host_pool import HostPool, Hosts
from hvdkit.launch.elastic.restart_policy import RestartPolicy
from hvdkit.launch.run.output import Interruption, Output
from hvdkit.launch.run.supervisor import JobSupervisor
from hvdkit.launch.state.outcome import JobResult, Outcome
from hvdkit.launch.state.ranks import Ranks

pytestmark = pytest.mark.timeout(30)

DIED = JobResult(137, ("rank 0 was killed.",), outcome=Outcome.RANK_DIED)
SAVED = JobResult(TRY_AGAIN, ("saved, not finished.",), outcome=Outcome.SAVED)


async def nothing(supervisor: JobSupervisor) -> None:
    """Nothing happens."""


def supervise(
    result: JobResult, during: Callable[[JobSupervisor], Awaitable[None]], after: Callable[[], None]
) -> tuple[int, int]:
    """Run a job of which each attempt gives this result; returns the exit code and the number of attempts.

    during: awaited in each attempt. after: called when one has been reported.
    """
    output, attempts = Output(quiet=False), []

    def make_runner(hosts: Hosts, ranks: int) -> Any:
        async def run_once() -> JobResult:
            attempts.append(ranks)
            assert len(attempts) < 3
            await during(supervisor)
            return result

        job = SimpleNamespace(planned=())
        return SimpleNamespace(run_once=run_once, report=lambda _: after(), ranks=Ranks(ranks), job=job)

    policy = RestartPolicy(min_ranks=1, max_ranks=2)
    pool = HostPool((), output.say)
    supervisor = JobSupervisor(make_runner, (), 2, policy, pool, output, Interruption(output))
    return asyncio.run(supervisor.run()), len(attempts)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_job_that_saves_for_better_hosts_is_not_started_again_when_it_was_asked_to_end() -> None:
    reported = []

    async def during(supervisor: JobSupervisor) -> None:
        supervisor._asked_to_save = True
        interrupt()
        while not supervisor.interruption.number:  # the loop handles signals
            await asyncio.sleep(0)

    assert supervise(SAVED, during, lambda: reported.append(1)) == (TRY_AGAIN, 1)
    assert reported == [1]


def test_a_signal_after_an_attempt_is_why_there_is_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(DIED, nothing, interrupt) == (128 + signal.SIGTERM, 1)
    assert "SIGTERM: not started again." in capfd.readouterr().err
