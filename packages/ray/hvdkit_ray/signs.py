"""Heartbeats of workers whose main thread is busy with a function, so that Ray cannot query them.

A thread of each worker counts up a number in the key-value store of Ray's head node. The driver reads these numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable

from hvdkit.log import logger
from hvdkit.optional_import import optional_import

kept = optional_import("ray.experimental.internal_kv")

_NAMESPACE = "hvdkit"
_LONGEST_PAUSE_S = 10.0
#: Least number of signs in the time after which a worker counts as stopped.
_SIGNS = 4


def pause_between_signs(limit_s: float) -> float:
    """Return the seconds between two signs; a worker without a sign for limit_s counts as stopped."""
    return min(_LONGEST_PAUSE_S, limit_s / _SIGNS)


def send_heartbeats(key: str, pause_s: float) -> None:
    """Report under this key that this process runs, from now until it ends."""
    threading.Thread(target=_give, args=(key, pause_s), name="hvdkit-signs-of-life", daemon=True).start()


def _give(key: str, pause_s: float) -> None:
    count = 0
    while True:
        count += 1
        with contextlib.suppress(Exception):  # the head node is away for a while: the driver cannot read then
            kept._internal_kv_put(key, str(count), overwrite=True, namespace=_NAMESPACE)
        time.sleep(pause_s)


class HeartbeatMonitor:
    """The driver's view of the signs. limit_s: seconds without a sign after which a worker counts as stopped."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.pause_s = limit_s, pause_between_signs(limit_s)
        self._prefix = f"signs-{secrets.token_hex(8)}"
        self._last: dict[int, tuple[bytes | None, float]] = {}

    def key(self, worker: int) -> str:
        """Return the key of a worker."""
        return f"{self._prefix}-{worker}"

    def begin(self) -> None:
        """Start to measure silence from now."""
        self._last = {}

    def find_dead(self, workers: Iterable[int]) -> dict[int, float]:
        """Find the workers without a sign for limit_s, with the seconds since their last sign was seen."""
        silent: dict[int, float] = {}
        for worker in workers:
            try:
                sign = kept._internal_kv_get(self.key(worker), namespace=_NAMESPACE)
            except Exception as error:  # any error of Ray's: the state of the workers is unknown
                logger.debug("the signs of life of Ray's workers cannot be read: %s", error)
                self.begin()
                return {}
            now = time.monotonic()
            before, seen_s = self._last.get(worker, (None, now))
            if worker not in self._last or sign != before:
                self._last[worker] = sign, now
            elif now - seen_s > self.limit_s:
                silent[worker] = now - seen_s
        return silent

    def close(self) -> None:
        """Remove the signs; harmless if Ray is down."""
        with contextlib.suppress(Exception):
            kept._internal_kv_del(self._prefix, del_by_prefix=True, namespace=_NAMESPACE)
