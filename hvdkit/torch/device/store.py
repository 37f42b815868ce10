"""A store for torch's process groups that opens no port: its entries go through the mailbox of hvdkit's transport.

Ranks use it only while they connect: a backend writes its addresses or its identifier, and reads those of other ranks.
Rank 0 passes entries on, because it alone can exchange messages with every rank (see Mailbox.star).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.polling import Backoff
from hvdkit.transport.small_collectives import pack, unpack

_Store: Any = dist.Store  # type: ignore[attr-defined]  # torch has no types for it


class ExchangeStore(_Store):  # type: ignore[misc]
    """Entries that all ranks of a transport see, while serve() runs on each of them.

    transport: of the ranks; making the store is collective.
    Only set(), get(), wait() and check() are supported, which is what the backends call to connect.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._rank, self._size = transport.rank, transport.size
        self._transport = transport
        self._mailbox = transport.open_mailbox()
        self._changed = threading.Condition()
        self._entries: dict[str, bytes] = {}
        self._written: list[tuple[str, bytes]] = []  # by this rank, and not sent
        self._ended = ""  # why no entry will come any more

    def set(self, key: str, value: bytes | str) -> None:
        """Write an entry. torch calls it, from threads of its own too."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._entries[key] = data
            if not self._ended:  # no one reads what a backend writes later, such as its debugging
                self._written.append((key, data))
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Wait for an entry and return it. Raises RuntimeError if it does not come any more."""
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all entries are there. serve() limits the time. Raises RuntimeError if they will not come."""
        with self._changed:
            while not all(key in self._entries for key in keys):
                if self._ended:
                    missing = [key for key in keys if key not in self._entries]
                    raise RuntimeError(f"no rank has written {', '.join(missing)}: {self._ended}")
                self._changed.wait(1.0)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all entries are there."""
        return all(key in self._entries for key in keys)

    def has_extended_api(self) -> bool:
        """Return False: torch then calls none of the optional methods."""
        return False

    def serve(self, connected: threading.Event, problems: Sequence[str], timeout_s: float) -> list[str]:
        """Exchange entries until every rank is connected, or one has failed to connect; collective.

        Other ranks may wait for a rank that has failed, in the store or in their backend, so they do not end by
        themselves: their waits in the store then raise its error.

        connected: set when this rank's own attempt has ended.
        problems: why it failed; empty if it did not. Read after `connected` is set.
        timeout_s: limit, in seconds.
        Returns why ranks have failed, by rank and the same on all ranks; "" for a rank that has not.
        Raises RankLostError if a rank has ended, TransportError after the time limit.
        """
        ends: list[str] | None = None
        ended: dict[int, str] = {}
        told = False
        deadline, pause = time.monotonic() + timeout_s, Backoff(self._transport.check)
        try:
            while ends is None:
                moved = self._send_written()
                if connected.is_set() and not told:
                    told = moved = True
                    self._send_written()  # what was written last
                    self._mailbox.send(0, pack(("ended", "; ".join(problems))))
                for sender, message in self._mailbox.receive():
                    moved = True
                    ends = self._take(sender, message, ended) or ends
                if self._rank == 0 and ends is None and (len(ended) == self._size or any(ended.values())):
                    ends = [ended.get(rank, "") for rank in range(self._size)]
                    for rank in range(1, self._size):
                        self._mailbox.send(rank, pack(("all ended", ends)))
                if time.monotonic() > deadline:
                    raise TransportError(
                        f"The ranks did not connect within {timeout_s:g} s: rank {self._rank} has "
                        f"{'connected' if told else 'not connected'} and waits for the others."
                    )
                if not moved:
                    pause.pause()
        except BaseException as error:  # whatever ends it: the backend's thread must not wait for entries any more
            self._end(str(error))
            raise
        failed = [f"rank {rank} could not connect: {why}" for rank, why in enumerate(ends) if why]
        self._end("; ".join(failed) or "all ranks have connected")
        return ends

    def _take(self, sender: int, message: bytes, ended: dict[int, str]) -> list[str] | None:
        """Process a message; returns the result of serve() if it is the last one."""
        kind, *values = unpack(message)
        if kind == "all ended":
            ends: list[str] = values[0]
            return ends
        if kind == "ended":
            ended[sender] = values[0]
            return None
        key, data = values
        with self._changed:
            self._entries[key] = data
            self._changed.notify_all()
        if self._rank == 0:
            for rank in range(1, self._size):
                if rank != sender:
                    self._mailbox.send(rank, message)
        return None

    def _send_written(self) -> bool:
        with self._changed:
            written, self._written = self._written, []
        for key, data in written:
            message = pack(("set", key, data))
            for rank in range(1, self._size) if self._rank == 0 else (0,):
                self._mailbox.send(rank, message)
        return bool(written)

    def _end(self, why: str) -> None:
        with self._changed:
            self._ended = why
            self._changed.notify_all()

    def close(self, *, idle: bool = True) -> None:
        """Close the mailbox; collective if `idle`, see Mailbox.close."""
        self._mailbox.close(idle=idle)
