"""Small operations that ranks do on a lane (transport/shared/lane.py), without asking whether others have them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

from hvdkit.engine.named.announcement import Announcement
from hvdkit.engine.named.execution import Operation, factors
from hvdkit.engine.named.integers import finish_average, widen
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buffer import SCALED, STORAGE, Op
from hvdkit.transport.shared.lane import Lane, message_bytes


@dataclass(frozen=True)
class Shortcut:
    """What is known of all operations with one announcement.

    digest: of the announcement, 63 bits. parts: of the message, as (dtype, elements, first byte). root: whose message
    counts, of a broadcast. op: of an allreduce. averaged: its sums are divided by the number of ranks. scale: of its
    result, of floating point.
    """

    digest: int
    parts: tuple[tuple[str, int, int], ...]
    root: int = -1
    op: Op | None = None
    averaged: bool = False
    scale: float = 1.0


def plan_shortcut(asked: Announcement, limit: int, size: int) -> Shortcut | None:
    """How `size` ranks do it on a lane with messages of at most `limit` bytes; None if it is not for a lane."""
    options = dict(asked.options)
    if asked.kind not in ("allreduce", "broadcast", "barrier") or options.get("op") == "adasum":
        return None
    before = float(options.get("prescale factor", "1")) != 1
    after = float(options.get("postscale factor", "1")) != 1
    summed = options.get("op") in ("average", "sum") and all(dtype in SCALED for dtype, _ in asked.tensors)
    if before or (after and not summed):
        return None
    counts = [math.prod(shape) for _, shape in asked.tensors]
    sizes = [count * STORAGE[dtype].itemsize for count, (dtype, _) in zip(counts, asked.tensors, strict=True)]
    total, starts = message_bytes(sizes)
    if total > limit:
        return None
    parts = tuple((dtype, count, at) for (dtype, _), count, at in zip(asked.tensors, counts, starts, strict=True))
    digest = _digest(repr(asked))
    if asked.kind != "allreduce":
        return Shortcut(digest, parts, root=int(options.get("root rank", "-1")))
    op: Op = "sum" if options["op"] in ("average", "sum") else options["op"]  # type: ignore[assignment]
    _, after_sum = factors(asked, size)
    return Shortcut(digest, parts, op=op, averaged=options["op"] == "average", scale=after_sum)


def key_of(name: str, shortcut: Shortcut) -> int:
    """What a message is shown under: the same on two ranks just where they mean the same operation, 63 bits."""
    return _digest(name) ^ shortcut.digest


@lru_cache(maxsize=1024)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def show(lane: Lane, rank: int, operation: Operation, shortcut: Shortcut) -> bool:
    """Show this rank's part; False if that has to wait."""
    mute = shortcut.root >= 0 and shortcut.root != rank
    return lane.show(key_of(operation.name, shortcut), () if mute else operation.buffers)


def take(lane: Lane, operation: Operation, shortcut: Shortcut, arithmetic: Arithmetic) -> None:
    """Make the result of what all ranks have shown; every rank does the same, so it has the same bits everywhere."""
    if shortcut.root >= 0:
        for buffer, (dtype, count, at) in zip(operation.buffers, shortcut.parts, strict=True):
            arithmetic.copy(buffer, lane.read(at, count, dtype)[shortcut.root])
        return
    if shortcut.op is None:
        return
    for buffer, (dtype, count, at) in zip(operation.buffers, shortcut.parts, strict=True):
        sources = lane.read(at, count, dtype)
        if dtype in SCALED:
            arithmetic.combine(buffer, sources, shortcut.op, shortcut.scale)
        elif shortcut.averaged:
            totals = [widen(source, len(sources)) for source in sources]
            arithmetic.combine(totals[0], totals)
            finish_average(buffer, totals[0], len(sources))
        else:
            arithmetic.combine(buffer, sources, shortcut.op)
