"""The signals that ask hvdrun to end a job."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from hvdkit.launch.job.output import Output

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Whether hvdrun was asked to end the job, and how.

    number: the first signal; 0 for none. hurried: by another one than SIGTERM, which schedulers send more than once.
    on_signal: called after each. output: a write to it that waits for a reader does not keep hvdrun from ending.
    """

    def __init__(self, output: Output) -> None:
        self.number = 0
        self.hurried = False
        self.on_signal: Callable[[], None] = lambda: None
        self._output = output

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals within; the loop has to run."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._record, number)
            signal.signal(number, self._unblock)  # is called at once; the loop calls _record when no write blocks it
        signal.signal(signal.SIGALRM, self._unblock)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _record(self, number: signal.Signals) -> None:
        self.hurried = self.hurried or number != signal.SIGTERM
        self.number = self.number or int(number)
        self.on_signal()

    def _unblock(self, number: int, frame: object) -> None:
        left_s = self._output.leave_unread_write()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, left_s)
