"""Collectives and messages under way, as torch.distributed hands them to the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.errors import TransportError
from hvdkit.transport.request import Request


class Waits:
    """seconds: for which the works of a process group have held up the threads that called or waited for them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the seconds of a `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class Done(dist.Work):
    """What was done before the call returned. outputs: the tensors that it filled."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        """There is none: an error has come out of the call."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that were filled."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done, of the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class Pending(dist.Work):
    """Something under way. outputs: the tensors that it fills."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self.done, self.error = False, None

    error: BaseException | None

    def is_completed(self) -> bool:
        """Is it done, or has it failed? Never waits."""
        return self.done

    def is_success(self) -> bool:
        """Is it done, without an error?"""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """What it has failed with."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """See wait()."""
        self.wait()


class Message(Pending):
    """A message under way. request: the transport's. after: called when it is done, before the outputs are used."""

    def __init__(
        self,
        request: Request,
        outputs: Sequence[torch.Tensor],
        after: Callable[[], object] | None,
        waits: Waits,
    ) -> None:
        super().__init__(outputs)
        self._request, self._after, self._waits = request, after, waits
        self._lock = threading.Lock()

    def get_future(self) -> torch.futures.Future[Any]:
        """Refused, as by Gloo: nobody would complete it."""
        raise TransportError("get_future(): a message of the hvdkit backend has no future. Call wait().")

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done. Raises what it has failed with, RankLostError where the other rank has died."""
        with self._lock:
            if not self.done:
                with self._waits.counting():
                    self._try(self._request.wait)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done and self._lock.acquire(blocking=False):
            try:
                if not self.done:
                    self._try(self._request.done)
            finally:
                self._lock.release()
        return self.done

    def _try(self, call: Callable[[], object]) -> None:
        try:
            if call() is False:
                return
            if self._after is not None:
                self._after()
        except Exception as error:
            self.error = error
        self.done = True
