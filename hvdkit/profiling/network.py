"""The network between hosts: as somebody says it is, as it was measured, or as nothing else is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from hvdkit.errors import ProfileError
from hvdkit.profiling.prediction import Cluster, reduce_s
from hvdkit.profiling.steps import Steps
from hvdkit.transport.between.cost import Link

_LATENCY_S = 50e-6  # of TCP in a machine room
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([mg])bit(?:/s)?(?:,(\d+(?:\.\d+)?)\s*(us|ms))?", re.IGNORECASE)


@dataclass(frozen=True)
class Network:
    """A link, and how it is known: "given", "measured", "as this job had it" or "assumed"."""

    link: Link
    known: str

    def __str__(self) -> str:
        rate = 8e-9 / self.link.byte_s if self.link.byte_s else float("inf")
        return f"{rate:.3g} Gbit/s, {1e6 * self.link.latency_s:.3g} us ({self.known})"


def parse_network(text: str) -> Network:
    """Read "10gbit" or "10gbit,30us": the rate of one direction, and the time of a message without bytes.

    Raises ProfileError for anything else.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ProfileError(f"{text!r} is no network; write it like 10gbit, 100gbit,5us or 500mbit,1ms.")
    bits = float(found[1]) * {"m": 1e6, "g": 1e9}[found[2].lower()]
    latency = float(found[3]) * {"us": 1e-6, "ms": 1e-3}[found[4].lower()] if found[3] else _LATENCY_S
    return Network(Link(latency, 8 / bits), "given")


def find_network(steps: Steps, hosts: int) -> Network:
    """The network of a job, from what its transport measured, or from how long its buckets took on so many hosts."""
    measured = next((one.link for one in steps.ranks if one.link is not None), None)
    if measured is not None:
        return Network(Link(*measured), "measured")
    if hosts > 1:
        return Network(Link(_LATENCY_S, _fit_byte_s(steps, hosts)), "as this job had it")
    return Network(Link(_LATENCY_S, 8 / 10e9), "assumed")


def _fit_byte_s(steps: Steps, hosts: int) -> float:
    """Seconds of a byte with which all buckets of a step take as long as they did.

    A bucket's time begins when all ranks have it and the one before is done, and ends when the first rank sees its sum.
    """
    ready, done = steps.ready.max(axis=0), steps.reduced.min(axis=0)
    before = np.concatenate([ready[:, :1], done[:, :-1]], axis=1)
    took = float(np.median((done - np.maximum(ready, before)).clip(0), axis=0).sum())
    low, high = 1e-13, 1e-6
    for _ in range(60):
        middle = (low * high) ** 0.5
        cluster = Cluster(Link(_LATENCY_S, middle))
        if sum(reduce_s(cluster, hosts, nbytes) for nbytes in steps.plan.wire_bytes) < took:
            low = middle
        else:
            high = middle
    return low
