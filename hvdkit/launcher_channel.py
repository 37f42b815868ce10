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
INIT = "coming"
#: The rank has joined the others; is on its way to others, which takes all of them; its training is over; a checkpoint
#: is on the disk.
READY, CHANGING, TRAINED, CHECKPOINTED = "ready", "changes", "over", "kept"
#: The rank has ended without meeting others, see startup/site/hvdkit_lone_rank.py.
LONE = "lone"
#: With numbers: the sums of a rank, see announce_totals(). With a number and a name: see announce_value().
TOTALS, VALUE = "totals:", "value:"
#: With a number: ranks that come with a smaller one are not waited for any more.
FIRST_AWAITED = "past:"
#: From hvdrun. With a number: that rank will not come. With its name for MPI's launcher: that rank is gone.
FAILED, LOST = "failed:", "lost:"

_LARGEST_READ = 4096
_MOST_IN_A_PART = 4 * 3000  # a bit for each rank, in a word that is read at once

#: What ranks that wait for a part of the job may have to be told.
START_MPI = "every other process of the job must start MPI (`from mpi4py import MPI` does)"


class _Listener:
    """descriptor: that is listened to; -1 for none. handlers: by what a message begins with."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.handlers: dict[str, Callable[[str], None]] = {}

    def run(self) -> None:
        """Hand on what comes, until the agent is gone."""
        held = b""
        while True:
            try:
                data = os.read(self.descriptor, _LARGEST_READ)
            except OSError:
                return
            if not data:
                return
            *words, held = (held + data).split(b"\n")
            for word in words:
                self.hear(word.decode(errors="replace"))

    def hear(self, word: str) -> None:
        """Hand one word on."""
        for kind, handle in list(self.handlers.items()):
            if word.startswith(kind):
                handle(word[len(kind) :])


_listener = _Listener()


class InitCall(NamedTuple):
    """What a rank says that has called init(). The seconds are its settings stall_check_s and stall_shutdown_s.

    part: the ranks that it is to meet there, if those are not all.
    """

    check_s: float
    shutdown_s: float
    part: frozenset[int] = frozenset()


def announce_init(check_s: float, shutdown_s: float, part: Collection[int] = ()) -> str:
    """The word of a rank that calls init(). part: see InitCall; () for all ranks, or for what no word has room for."""
    members = f":{sum(1 << rank for rank in part):x}" if part and max(part) < _MOST_IN_A_PART else ""
    return f"{INIT}:{check_s:.3f}:{shutdown_s:.3f}{members}"


def parse_init_call(word: str) -> InitCall | None:
    """Read the word of a rank that calls init(); None for another word."""
    found = re.fullmatch(INIT + r":(\d{1,12}\.\d{3}):(\d{1,12}\.\d{3})(?::([0-9a-f]{1,3000}))?", word, re.ASCII)
    if found is None:
        return None
    bits = int(found[3] or "0", 16)
    return InitCall(
        float(found[1]), float(found[2]), frozenset(at for at in range(bits.bit_length()) if bits >> at & 1)
    )


class Totals(NamedTuple):
    """Sums of what a rank has done, see engine/observe/totals.py."""

    rounds: int
    waited_s: float
    nbytes: int
    samples: float
    device_rounds: int = 0

    def since(self, before: Totals) -> Totals:
        """What was added."""
        rounds, device_rounds = self.rounds - before.rounds, self.device_rounds - before.device_rounds
        waited_s, samples = self.waited_s - before.waited_s, self.samples - before.samples
        return Totals(rounds, waited_s, self.nbytes - before.nbytes, samples, device_rounds)

    @property
    def known_wait_s(self) -> float:
        """waited_s; nan where a GPU's stream has waited in some of the rounds."""
        return math.nan if self.device_rounds else self.waited_s


def announce_totals(totals: Totals) -> str:
    """The word of a rank that tells its sums."""
    return f"{TOTALS}{totals.rounds}:{totals.known_wait_s!r}:{totals.nbytes}:{totals.samples!r}"


def parse_totals(word: str) -> Totals | None:
    """Read the word of a rank that tells its sums; None for another word, and for one that is cut off."""
    parts = word.removeprefix(TOTALS).split(":")
    if not word.startswith(TOTALS) or len(parts) != 4:
        return None
    try:
        return Totals(int(parts[0]), float(parts[1]), int(parts[2]), float(parts[3]))
    except ValueError:
        return None


def announce_value(key: str, value: float) -> str:
    """The word of rank 0 that tells a value which the script has logged."""
    return f"{VALUE}{value!r}:{quote(key, safe='')}"


def parse_value(word: str) -> tuple[str, float] | None:
    """Read the word of rank 0 that tells a logged value, as (key, value); None for another word."""
    number, colon, key = word.removeprefix(VALUE).partition(":")
    if not word.startswith(VALUE) or not colon or not key:
        return None
    try:
        return unquote(key), float(number)
    except ValueError:
        return None


def notify_launcher(word: str, place: str) -> None:
    """Send a message to hvdrun; returns at once. place: the socket to the agent, as "descriptor:inode"; "" for none.

    The inode tells it from what a process has open there that has inherited no more than the variable.
    """
    descriptor = _find(place)
    if descriptor < 0:
        return
    try:
        os.write(descriptor, f"{word}\n".encode())
    except OSError as error:
        logger.warning("The message %r of this rank could not be sent to hvdrun: %s", word, error.strerror)


def on_message(kind: str, handle: Callable[[str], None]) -> None:
    """Call `handle` with what follows `kind` in each message of hvdrun's from now on, in a thread of its own."""
    _listener.handlers[kind] = handle


def listen_to_launcher(place: str) -> None:
    """Begin to receive hvdrun's messages, if this process does not yet; returns at once. place: see notify_launcher."""
    descriptor = _find(place)
    if descriptor < 0 or _listener.descriptor >= 0:
        return
    _listener.descriptor = descriptor
    threading.Thread(target=_listener.run, name="hvdkit-launcher-channel", daemon=True).start()


def _find(place: str) -> int:
    """The descriptor of the socket; -1 if it is not open here."""
    descriptor, _, inode = place.partition(":")
    if not (descriptor.isdecimal() and inode.isdecimal()):
        return -1
    try:
        found = os.fstat(int(descriptor))
    except OSError:
        return -1
    return int(descriptor) if stat.S_ISSOCK(found.st_mode) and found.st_ino == int(inode) else -1
