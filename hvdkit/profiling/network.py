"""Finds the network between hosts: given by the user, measured by the transport, fitted to the steps, or assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from hvdkit.errors import ProfileError
from hvdkit.profiling.prediction import Cluster, reduce_s
from hvdkit.profiling.steps import Steps
from hvdkit.transport.between.select import Link

_LATENCY_S = 50e-6  # of TCP in a data center
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([mg])bit(?:/s)?(?:,(\d+(?:\.\d+)?)\s*(us|ms))?", re.IGNORECASE)


@dataclass(frozen=True)
class Network:
    """A link and the source of its numbers: "given", "measured", "estimated" or "assumed"."""

    link: Link
    known: str

    def __str__(self) -> str:
        rate = 8e-9 / self.link.byte_s if self.link.byte_s else float("inf")
        return f"{rate:.3g} Gbit/s, {1e6 * self.link.latency_s:.3g} us ({self.known})"


def parse_network(text: str) -> Network:
    """Parse "10gbit" or "10gbit,30us": the rate of one direction, and the latency of an empty message.

    Raises ProfileError for any other text.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ProfileError(f"{text!r} is not a network. Examples: 10gbit, 100gbit,5us or 500mbit,1ms.")
    bits = float(match[1]) * {"m": 1e6, "g": 1e9}[match[2].lower()]
    latency = float(match[3]) * {"us": 1e-6, "ms": 1e-3}[match[4].lower()] if match[3] else _LATENCY_S
    return Network(Link(latency, 8 / bits), "given")


def find_network(steps: Steps, hosts: int) -> Network:
    """Return the network of a job on `hosts` hosts: measured by its transport, or fitted to the time of its buckets."""
    measured = next((rank.link for rank in steps.ranks if rank.link is not None), None)
    if measured is not None:
        return Network(Link(*measured), "measured")
    if hosts > 1:
        return Network(Link(_LATENCY_S, _fit_byte_s(steps, hosts)), "estimated")
    return Network(Link(_LATENCY_S, 8 / 10e9), "assumed")


def reduction_s(steps: Steps) -> float:
    """Return the measured time of all buckets of a step, one after another.

    A bucket's time begins when all ranks have filled it and the previous bucket is reduced, and ends when the first
    rank has its sum.
    """
    ready, done = steps.ready.max(axis=0), steps.reduced.min(axis=0)
    before = np.concatenate([ready[:, :1], done[:, :-1]], axis=1)
    return float(np.median((done - np.maximum(ready, before)).clip(0), axis=0).sum())


def _fit_byte_s(steps: Steps, hosts: int) -> float:
    """Fit the seconds of a byte to the time of all buckets of a step."""
    measured_s = reduction_s(steps)
    low, high = 1e-13, 1e-6
    for _ in range(60):
        middle = (low * high) ** 0.5
        cluster = Cluster(Link(_LATENCY_S, middle))
        if sum(reduce_s(cluster, hosts, nbytes) for nbytes in steps.plan.wire_bytes) < measured_s:
            low = middle
        else:
            high = middle
    return low
