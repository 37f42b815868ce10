"""A thread that sends recorded rounds to `hvdkit profile` twice a second, so that a job that fails is profiled too."""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict

from hvdkit.engine.observe.device_clock import READINGS
from hvdkit.engine.observe.recording import PlanFacts, RankFacts, Recorder
from hvdkit.handshake import Session, open_connection
from hvdkit.log import logger

PURPOSE = b"profile"  # of the handshake
#: Kinds of frames: RankFacts as JSON; PlanFacts as JSON; rounds: 4 bytes, the number of the plan's frame, and rows.
ABOUT, PLAN, ROWS = b"A", b"P", b"R"
_EVERY_S = 0.5
_CONNECT_S = 5.0
_END_S = 5.0  # how long the end of the process waits until the last rounds are sent


def connect(place: str) -> tuple[socket.socket, Session]:
    """Connect to a collector. place: KEY@PORT@ADDRESS,ADDRESS,...; uses the first address that proves to have the key.

    Raises OSError with the addresses that were tried.
    """
    key, port, addresses = place.split("@")
    problems = []
    for address in addresses.split(","):
        try:
            return open_connection(address, int(port), key.encode(), PURPOSE, timeout_s=_CONNECT_S)
        except OSError as error:  # noqa: PERF203
            problems.append(f"{address} port {port}: {error}")
    raise OSError("; ".join(problems))


class RecordSender:
    """Sends the recordings of this process, in a thread.

    recorder: of this process. place: see connect(). about: returns the facts of this rank; called before the first
    rounds are sent.
    """

    def __init__(self, recorder: Recorder, place: str, about: Callable[[], RankFacts]) -> None:
        self._recorder, self._place, self._about = recorder, place, about
        self._sent_facts = False
        self._plans: list[PlanFacts] = []
        self._ending = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hvdkit-record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Send the last rounds, and end the thread."""
        if os.getpid() == self._process:
            self._ending.set()
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            connection, session = connect(self._place)
        except OSError as error:
            logger.warning("This rank is not profiled because it cannot connect to `hvdkit profile`: %s", error)
            return
        try:
            while not self._ending.wait(_EVERY_S):
                self._send(connection, session)
            self._send(connection, session, ended=True)
            connection.close()
        except OSError:
            pass  # `hvdkit profile` has ended

    def _send(self, connection: socket.socket, session: Session, *, ended: bool = False) -> None:
        if ended:
            READINGS.read_pending()
        plans = self._recorder.take()
        if (plans or ended) and not self._sent_facts:
            self._sent_facts = True
            connection.sendall(session.seal(ABOUT, json.dumps(asdict(self._about())).encode()))
        for rounds in plans:
            if rounds.facts not in self._plans:
                self._plans.append(rounds.facts)
                connection.sendall(session.seal(PLAN, json.dumps(asdict(rounds.facts)).encode()))
            number = self._plans.index(rounds.facts)
            connection.sendall(session.seal(ROWS, number.to_bytes(4, "little") + b"".join(rounds.rows)))
