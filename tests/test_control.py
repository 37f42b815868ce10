"""Agents that come to hvdrun all at once are all let in; one that has lost it finds out whether it is there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdkit.launch.agent.wire import look_for_hvdrun
from hvdkit.launch.control import Control
from hvdkit.launch.ranks import Ranks

_COMING = 300
_WAITING = Path("/proc/sys/net/core/somaxconn")


async def _open(ranks: int) -> Control:
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    control = Control(Ranks(ranks), nothing, nothing, nothing)
    await control.open(("127.0.0.1",), folder="")
    return control


async def _come_before_anyone_is_let_in() -> None:
    control = await _open(_COMING)
    port = int(control.variables["HVDKIT_CONTROL"].split(":")[1])
    with contextlib.ExitStack() as stack:
        for _ in range(_COMING):  # nothing is awaited, so all wait in the system's queue
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
    await control.close()


@pytest.mark.skipif(_WAITING.exists() and int(_WAITING.read_text()) < _COMING, reason="the system's queue is short")
def test_hundreds_of_agents_find_room_to_wait() -> None:
    asyncio.run(_come_before_anyone_is_let_in())  # a TimeoutError is of one that found none


async def _look(addresses: str = "127.0.0.1", secret: str = "") -> tuple[bool | None, bool | None]:
    """What an agent finds while hvdrun is there, and when it has ended."""
    control = await _open(1)
    port = control.variables["HVDKIT_CONTROL"].split(":")[1]
    given = f"tcp:{port}:{addresses}", secret or control.variables["HVDKIT_CONTROL_SECRET"]
    there = await asyncio.to_thread(look_for_hvdrun, *given)
    await control.close()
    return there, await asyncio.to_thread(look_for_hvdrun, *given)


def test_an_agent_finds_out_whether_hvdrun_is_there() -> None:
    assert asyncio.run(_look()) == (True, False)
    assert asyncio.run(_look("127.0.0.2,127.0.0.1")) == (True, False)


def test_what_does_not_know_the_secret_is_not_hvdrun() -> None:
    assert asyncio.run(_look(secret="another"))[0] is not True


def test_where_nothing_answers_nothing_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert look_for_hvdrun(f"tcp:{mute.getsockname()[1]}:127.0.0.1", "secret") is None
