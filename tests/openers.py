"""The transports that the tests know, by name: each opens on all ranks of a job together."""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.transport.base import Transport
from hvdkit.transport.mpi import open_mpi
from hvdkit.transport.single import SingleTransport

OPENERS: dict[str, Callable[[], Transport]] = {
    "single": SingleTransport,
    "mpi": open_mpi,
}
