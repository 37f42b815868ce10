"""Wait in asyncio for a condition, or with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class ChangeEvent(asyncio.Event):
    """An event that is set after each change that tasks may wait for."""

    async def wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is true, for `seconds` at most; it is checked after each change."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with time_limit(seconds):
                while not true():
                    self.clear()  # not wait_for(): another waiter may clear before its task begins to wait
                    await self.wait()


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, for Python 3.10, which does not have it."""
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
