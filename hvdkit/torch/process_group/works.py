"""Collectives and messages under way, as the Work objects of torch.distributed."""

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
    """seconds: time for which works of a process group have blocked the threads that called or waited for them."""

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
    """The Work of a collective that is done when the call returns. outputs: the tensors that it filled."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        """Return None: the call itself has raised an error, if any."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the filled tensors."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future of the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class Pending(dist.Work):
    """The Work of an operation under way. outputs: the tensors that it fills."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self.done, self.error = False, None

    error: BaseException | None

    def is_completed(self) -> bool:
        """Return whether it is done, or has failed; never waits."""
        return self.done

    def is_success(self) -> bool:
        """Return whether it is done without an error."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error, or None."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills."""
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
        """Raise an error, as Gloo does: no thread would complete the future."""
        raise TransportError("get_future(): a message of the hvdkit backend has no future. Call wait().")

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is done. Raises its error, RankLostError if the other rank has died."""
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
