"""Waiting in asyncio: for a condition, and with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class ChangeEvent(asyncio.Event):
    """Is set whenever something has changed that others may wait for."""

    async def wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is true, which is checked after each change, but at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with time_limit(seconds):
                while not true():
                    self.clear()  # not wait_for(): another waiter may clear before its task begins to wait
                    await self.wait()


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, which Python 3.10 has not."""
    task = asyncio.current_task()
    assert task is not None
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if expired:
            raise asyncio.TimeoutError from None
        raise
    finally:
        timer.cancel()
