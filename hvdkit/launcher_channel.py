"""The launcher channel: messages between a rank and hvdrun, one a line, through the agent that started the rank."""

from __future__ import annotations

import math
import os
import re
import stat
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple
from urllib.parse import quote, unquote

from hvdkit.log import logger

#: The rank has called init(), see announce_init(), and waits for the others.
INIT = "init"
#: READY: the rank has joined the others. CHANGING: all ranks are changing to a new world. TRAINED: the rank's training
#: has ended. CHECKPOINTED: a checkpoint is on the disk.
READY, CHANGING, TRAINED, CHECKPOINTED = "ready", "changing", "trained", "checkpointed"
#: The rank has ended without connecting to other ranks, see startup/site/hvdkit_lone_rank.py.
LONE = "lone"
#: TOTALS, with numbers: the sums of a rank, see announce_totals(). VALUE, with a number and a name: see
#: announce_value().
TOTALS, VALUE = "totals:", "value:"
#: With a number: the job does not wait any longer for new ranks with a smaller number.
FIRST_AWAITED = "first_awaited:"
#: From hvdrun. FAILED, with a number: that rank will not come. LOST, with its name for MPI's launcher: that rank died.
FAILED, LOST = "failed:", "lost:"

_LARGEST_READ = 4096
_MOST_RANKS_IN_INIT = 4 * 3000  # one bit for each rank, in hexadecimal digits of a message that one read returns

#: A hint for messages to ranks that wait for the other ranks of a world of some ranks.
START_MPI = "every other process of the job must start MPI (`from mpi4py import MPI` does)"


class _Listener:
    """Receives hvdrun's messages. descriptor: the socket; -1 for none. handlers: by the prefix of their messages."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.handlers: dict[str, Callable[[str], None]] = {}

    def run(self) -> None:
        """Pass messages to the handlers until the agent closes the socket."""
        held = b""
        while True:
            try:
                data = os.read(self.descriptor, _LARGEST_READ)
            except OSError:
                return
            if not data:
                return
            *messages, held = (held + data).split(b"\n")
            for message in messages:
                self.dispatch(message.decode(errors="replace"))

    def dispatch(self, message: str) -> None:
        """Pass one message to the handlers of its prefix."""
        for kind, handle in list(self.handlers.items()):
            if message.startswith(kind):
                handle(message[len(kind) :])


_listener = _Listener()


class InitCall(NamedTuple):
    """The message of a rank that has called init(). The seconds are its settings stall_check_s and stall_shutdown_s.

    ranks: the ranks that call init() together with it; empty for all ranks.
    """

    check_s: float
    shutdown_s: float
    ranks: frozenset[int] = frozenset()


def announce_init(check_s: float, shutdown_s: float, ranks: Collection[int] = ()) -> str:
    """Encode the message of a rank that calls init().

    ranks: see InitCall; () for all ranks. It is left out if the list is too long for a message.
    """
    members = f":{sum(1 << rank for rank in ranks):x}" if ranks and max(ranks) < _MOST_RANKS_IN_INIT else ""
    return f"{INIT}:{check_s:.3f}:{shutdown_s:.3f}{members}"


def parse_init_call(message: str) -> InitCall | None:
    """Parse the message of a rank that calls init(); None for any other message."""
    found = re.fullmatch(INIT + r":(\d{1,12}\.\d{3}):(\d{1,12}\.\d{3})(?::([0-9a-f]{1,3000}))?", message, re.ASCII)
    if found is None:
        return None
    bits = int(found[3] or "0", 16)
    return InitCall(
        float(found[1]), float(found[2]), frozenset(at for at in range(bits.bit_length()) if bits >> at & 1)
    )


class Totals(NamedTuple):
    """Sums over the rounds of a rank, see engine/observe/totals.py."""

    rounds: int
    waited_s: float
    nbytes: int
    samples: float
    device_rounds: int = 0

    def since(self, before: Totals) -> Totals:
        """Return the differences between these sums and earlier ones."""
        rounds, device_rounds = self.rounds - before.rounds, self.device_rounds - before.device_rounds
        waited_s, samples = self.waited_s - before.waited_s, self.samples - before.samples
        return Totals(rounds, waited_s, self.nbytes - before.nbytes, samples, device_rounds)

    @property
    def known_wait_s(self) -> float:
        """Return waited_s; nan if a GPU's stream has waited in some of the rounds."""
        return math.nan if self.device_rounds else self.waited_s


def announce_totals(totals: Totals) -> str:
    """Encode the message with the sums of a rank."""
    return f"{TOTALS}{totals.rounds}:{totals.known_wait_s!r}:{totals.nbytes}:{totals.samples!r}"


def parse_totals(message: str) -> Totals | None:
    """Parse the message with the sums of a rank; None for any other message and for a truncated one."""
    parts = message.removeprefix(TOTALS).split(":")
    if not message.startswith(TOTALS) or len(parts) != 4:
        return None
    try:
        return Totals(int(parts[0]), float(parts[1]), int(parts[2]), float(parts[3]))
    except ValueError:
        return None


def announce_value(key: str, value: float) -> str:
    """Encode rank 0's message with a value that the script has logged."""
    return f"{VALUE}{value!r}:{quote(key, safe='')}"


def parse_value(message: str) -> tuple[str, float] | None:
    """Parse rank 0's message with a logged value, as (key, value); None for any other message."""
    number, colon, key = message.removeprefix(VALUE).partition(":")
    if not message.startswith(VALUE) or not colon or not key:
        return None
    try:
        return unquote(key), float(number)
    except ValueError:
        return None


def notify_launcher(message: str, place: str) -> None:
    """Send a message to hvdrun; returns at once.

    message: without a line end.
    place: the socket to the agent, as "descriptor:inode"; "" for none. The inode is compared because a process that
    inherited only the variable may have another file open with this descriptor.
    """
    descriptor = _find(place)
    if descriptor < 0:
        return
    try:
        os.write(descriptor, f"{message}\n".encode())
    except OSError as error:
        logger.warning("The message %r of this rank could not be sent to hvdrun: %s", message, error.strerror)


def on_message(kind: str, handle: Callable[[str], None]) -> None:
    """Register `handle` for hvdrun's messages that begin with `kind`; a thread calls it with the rest of each."""
    _listener.handlers[kind] = handle


def listen_to_launcher(place: str) -> None:
    """Start to receive hvdrun's messages, once in a process; returns at once. place: see notify_launcher."""
    descriptor = _find(place)
    if descriptor < 0 or _listener.descriptor >= 0:
        return
    _listener.descriptor = descriptor
    threading.Thread(target=_listener.run, name="hvdkit-launcher-channel", daemon=True).start()


def _find(place: str) -> int:
    """Return the descriptor of the socket; -1 if it is not open in this process."""
    descriptor, _, inode = place.partition(":")
    if not (descriptor.isdecimal() and inode.isdecimal()):
        return -1
    try:
        found = os.fstat(int(descriptor))
    except OSError:
        return -1
    return int(descriptor) if stat.S_ISSOCK(found.st_mode) and found.st_ino == int(inode) else -1
