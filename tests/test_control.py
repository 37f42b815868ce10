"""Agents that come to hvdrun all at once are all let in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdkit.launch.control import Control
from hvdkit.launch.verdict import Ranks

_COMING = 300
_WAITING = Path("/proc/sys/net/core/somaxconn")


async def _come_before_anyone_is_let_in() -> None:
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    control = Control(Ranks(_COMING), nothing, nothing, nothing)
    await control.open(("127.0.0.1",), folder="")
    port = int(control.variables["HVDKIT_CONTROL"].split(":")[1])
    with contextlib.ExitStack() as stack:
        for _ in range(_COMING):  # nothing is awaited, so all wait in the system's queue
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
    await control.close()


@pytest.mark.skipif(_WAITING.exists() and int(_WAITING.read_text()) < _COMING, reason="the system's queue is short")
def test_hundreds_of_agents_find_room_to_wait() -> None:
    asyncio.run(_come_before_anyone_is_let_in())  # a TimeoutError is of one that found none
