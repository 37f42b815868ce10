"""Where the ranks of a job send what they record, from any host and with any launcher.

Both sides prove that they know the job's key (multiprocessing's handshake); what is sent is numbers and JSON.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener

from hvdkit.engine.recording import Rounds
from hvdkit.profiling.recordings import RankRecording, as_recording, parse_facts, parse_plan
from hvdkit.transport.addresses import LOOPBACK, list_addresses

_BACKLOG = 1024
_GRACE_S = 2.0  # for connections to be read to their end, after that of the job


@dataclass
class _Rank:
    facts: dict[str, object]
    plans: list[Rounds] = field(default_factory=list)


class Collector:
    """Listens from its beginning to close(). place: what ranks are told, see engine.record_sender."""

    def __init__(self) -> None:
        key = secrets.token_hex(16)
        self._listener = Listener(("0.0.0.0", 0), backlog=_BACKLOG, authkey=key.encode())
        port = self._listener.address[1]
        self.place = f"{key}@{port}@{','.join([LOOPBACK, *_others()])}"
        self._ranks: list[_Rank] = []
        self._lock = threading.Lock()
        self._readers: deque[threading.Thread] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="hvdkit-collector", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # none of ours, or the end
            reader = threading.Thread(target=self._read, args=(connection,), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, connection: Connection) -> None:
        rank: _Rank | None = None
        with contextlib.suppress(OSError, EOFError):
            while True:
                message = connection.recv_bytes()
                if message[:1] == b"R" and rank is not None:
                    rounds = rank.plans[int.from_bytes(message[1:5], "little")]
                    size = 8 * rounds.facts.row
                    with self._lock:
                        rounds.rows.extend(message[at : at + size] for at in range(5, len(message), size))
                    continue
                said = json.loads(message)
                with self._lock:
                    if "about" in said:
                        rank = _Rank(said["about"])
                        self._ranks.append(rank)
                    elif rank is not None:
                        rank.plans.append(Rounds(parse_plan(said["plan"])))

    def close(self) -> list[RankRecording]:
        """End, and return what has come, by rank; of a rank that was started again, what it sent last."""
        until = time.monotonic() + _GRACE_S
        for reader in list(self._readers):
            reader.join(max(0.0, until - time.monotonic()))
        self._closing = True
        with contextlib.suppress(OSError):  # accept() does not see that its socket is closed
            socket.create_connection((LOOPBACK, self._listener.address[1]), timeout=1).close()
        self._listener.close()
        with self._lock:
            found = {one.facts.rank: one for one in (as_recording(parse_facts(r.facts), r.plans) for r in self._ranks)}
        return [found[rank] for rank in sorted(found)]


def _others() -> list[str]:
    return [address for address in list_addresses(LOOPBACK) if address != LOOPBACK]
