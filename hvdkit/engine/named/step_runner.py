"""Doing steps on one rank so that an error in one, or a hang, is known to all ranks (steps.py, step_books.py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.named.step_books import StepBooks
from hvdkit.engine.named.steps import Steps
from hvdkit.errors import HorovodInternalError, RankLostError, TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.polling import Backoff, watched

_UP, _DOWN = "step", "steps"  # messages to the first rank, and from it


class StepRunner:
    """Does the steps of an engine.

    send: sends a rank a message of a kind. talk: sends and receives; True if anything moved. talking: the lock for
    messages. failed: told why no operation can be done any more, and the error if it is this rank's. who: names a rank.
    notice_s: see Steps.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        *,
        send: Callable[[int, str, Any], None],
        talk: Callable[[], bool],
        talking: threading.RLock,
        failed: Callable[[str, HorovodInternalError | None], None],
        who: Callable[[int], str],
        notice_s: float,
    ) -> None:
        self._transport, self._send, self._talk, self._talking = transport, send, talk, talking
        self._failed, self._name = failed, who(transport.rank)
        self._steps = Steps(self._tell_first, self._name, notice_s, self._stop)
        self._books: StepBooks | None = None
        if transport.rank == 0:
            self._books = StepBooks(transport.size, config, lambda rank, told: self._tell(rank, _DOWN, told), who)
        self._ended: str | None = None  # why no step is begun any more, and one under way is left
        self._stopped = self._alone = False

    @property
    def stopped(self) -> bool:
        """Are all ranks stopped, or will they be? Some have left collectives before their end, or not begun them."""
        return self._stopped or self._steps.apart or (self._books is not None and self._books.stopped)

    def _tell_first(self, content: Any) -> None:
        if self._books is not None:
            self._books.hear(0, content)
        else:
            self._tell(0, _UP, content)

    def _tell(self, rank: int, kind: str, content: Any) -> None:
        with contextlib.suppress(TransportError):  # whoever waits for a rank that is gone is told of it there
            self._send(rank, kind, content)

    def hear(self, sender: int, kind: str, content: Any) -> None:
        """A message about steps; with the lock for messages."""
        if kind == _DOWN:
            self._steps.hear(content)
        elif self._books is not None:
            self._books.hear(sender, content)

    def leave(self) -> None:
        """This rank takes no further part; with the lock for messages."""
        self._tell_first(("left",))

    def closed(self) -> None:
        """The first rank, or one on the way to it, takes no further part."""
        self._alone = True

    def turn(self) -> None:
        """Tell of what takes long; called now and then, with the lock for messages."""
        self._steps.report()
        if self._books is not None:
            self._books.look()

    def do(self, label: str, step: Callable[[], None]) -> Exception | None:
        """Do a step; returns the error with which it has failed on all ranks alike, so that the engine goes on.

        Raises HorovodInternalError, with the text of the first error, if it has not, or the engine has been stopped.
        """
        if self._ended is not None:
            raise HorovodInternalError(self._ended)
        self._steps.begin(label)
        try:
            with watched(self._look):
                step()
        except Exception as error:
            return self._agree_on(error)
        finally:
            with self._talking:
                self._steps.end()
        return None

    def _look(self) -> None:
        """A step waits for other ranks: answer messages meanwhile, and end the wait if there is no hope."""
        self._steps.look()
        self._talk()
        if self._ended is not None:
            raise HorovodInternalError(self._ended)

    def _agree_on(self, error: Exception) -> Exception:
        if self._ended is not None:
            raise HorovodInternalError(self._ended) from error
        if not isinstance(error, RankLostError):  # else the others find it out by themselves
            with self._talking:
                certain = self._steps.fail(error)
            if certain or not isinstance(error, TransportError):
                return self._hear_of(error)
            self._stopped = True
            self._talk()
        failure = error if isinstance(error, HorovodInternalError) else HorovodInternalError(describe(error))
        self._end(str(failure), failure)
        raise failure

    def _hear_of(self, error: Exception) -> Exception:
        """Wait for what the first rank says of a failed step: return the error, or raise."""
        waiting = Backoff(self._transport.check)
        while self._ended is None:
            same = self._steps.alike()
            if same is None and self._alone:
                same = False
            if same is not None:
                return error if same else HorovodInternalError(f"{describe(error)} (on {self._name})")
            try:
                if not self._talk():
                    waiting.pause()
            except TransportError as lost:
                self._end(str(lost), lost)
        raise HorovodInternalError(self._ended) from error

    def stop_all(self, label: str, error: Exception) -> HorovodInternalError:
        """Stop the engine on all ranks, for an error outside of steps; returns what to raise here."""
        why = f"{label} failed on {self._name} with {describe(error)}"
        with self._talking:
            self._tell_first(("apart", 0, why))
        self._stopped = True
        self._talk()
        self._end(why)
        return HorovodInternalError(why)

    def _end(self, why: str, error: HorovodInternalError | None = None) -> None:
        """No step is done here any more."""
        self._ended = self._ended or why
        self._failed(why, error)

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._end(why)


def describe(error: Exception) -> str:
    """The error with its kind."""
    return f"{type(error).__name__}: {error}"
