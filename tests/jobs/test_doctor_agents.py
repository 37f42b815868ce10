"""The agents of hvdkit doctor on other hosts: what they answer, and why there is no answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hvdkit.config import read_environment
from hvdkit.tools.doctor.facts import HostFacts, decode
from hvdkit.tools.doctor.hosts.session import AgentLost, AgentSession
from hvdkit.tools.doctor.survey import Failure

Answer = TypeVar("Answer")

#: Variables with which programs are found, and nothing else.
BARE = {"PATH": "/bin:/usr/bin"}


def with_agent(
    argv: list[str], environ: dict[str, str], use: Callable[[AgentSession], Coroutine[Any, Any, Answer]]
) -> Answer:
    """What is done with an agent, which is ended after it."""

    async def run() -> Answer:
        agent = await AgentSession.open(argv, environ)
        try:
            return await use(agent)
        finally:
            await agent.close()

    return asyncio.run(run())


def test_an_agent_that_answers_and_those_that_do_not(tmp_path: Path) -> None:
    (tmp_path / "horovod-0.dist-info").mkdir()  # as if Horovod were not installed, which takes seconds to load
    environ = read_environment()
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), environ.get("PYTHONPATH")]))
    noisy = f"echo motd; exec {sys.executable} -m hvdkit.tools.doctor.hosts.agent"

    async def examine(agent: AgentSession) -> HostFacts:
        await agent.await_hello(20)
        assert await agent.ask("clock", 10) > 1e9
        with pytest.raises(AgentLost, match="'clock' failed: TypeError"):
            await agent.ask("clock", 10, colour="red")
        names = ["localhost", "nowhere.invalid"]
        variables = {"NCCL_DEBUG": "INFO"}
        found = await agent.ask("collect", 60, variables=variables, names=names, secret="s", host="a")
        assert found["addresses"][0] and not found["addresses"][1]
        targets = [("127.0.0.1", found["port"], host, host == "a") for host in ("a", "a", "b")]
        (problem, mbit), again, other = await agent.ask("connect", 10, secret="s", targets=targets)
        assert (problem, mbit > 10, again) == ("", True, ["", mbit]) and other == ["other", 0.0]
        return decode(HostFacts, found["facts"])

    facts = with_agent(["sh", "-c", noisy], environ, examine)
    assert facts.environ["NCCL_DEBUG"] == "INFO" and facts.python


@pytest.mark.parametrize(
    ("argv", "timeout_s", "failure"),
    [
        (["sh", "-c", "echo Permission denied >&2; echo motd; exit 3"], 10, Failure(3, "Permission denied\nmotd\n")),
        (["sh", "-c", "echo no home; exec sleep 60"], 0.3, Failure(None, "no home\n")),
    ],
)
def test_why_an_agent_does_not_answer(argv: list[str], timeout_s: float, failure: Failure) -> None:
    async def wait(agent: AgentSession) -> None:
        try:
            await agent.await_hello(timeout_s)
        finally:
            await asyncio.sleep(0.1)  # its pipes are found to be closed

    with pytest.raises(AgentLost) as lost:
        with_agent(argv, BARE, wait)
    assert lost.value.failure == failure


@pytest.mark.parametrize("holder", ["", "setsid sleep 5 & "], ids=["", "whose pipes another process holds"])
def test_a_host_that_stops_reading_is_lost_in_time(holder: str) -> None:
    async def ask(agent: AgentSession) -> None:
        await agent.await_hello(20)
        await agent.ask("collect", 0.3, names=["x" * (1 << 20)])  # more than a pipe holds

    with pytest.raises(AgentLost) as lost:
        with_agent(["sh", "-c", holder + """echo '{"hello": "0"}'; exec sleep 60"""], BARE, ask)
    assert lost.value.failure.status is None


def test_an_agent_whose_ssh_is_not_there() -> None:
    with pytest.raises(AgentLost) as lost:
        asyncio.run(AgentSession.open(["/no/such/ssh"], {}))
    assert lost.value.failure.status == 127
