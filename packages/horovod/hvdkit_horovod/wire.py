"""Dtypes in which Horovod's core sends numbers."""

from __future__ import annotations

from hvdkit.transport.buffer import Narrow
from hvdkit.transport.coding.api import Coding


def check_wire(what: str, dtype: str, wire: Narrow | Coding) -> Narrow:
    """The dtype in which numbers of `dtype` are sent; TypeError for coded ones, and for sums of bfloat16.

    what: is reduced so, for the message.
    """
    if not isinstance(wire, str):
        raise TypeError(
            f"compression={wire!r} is not supported by Horovod's core (the engine of this job), which sends values "
            "unchanged or as float16. Use hvd.Compression.fp16, or the native engine (HVDKIT_ENGINE=native)."
        )
    if "bfloat16" in (dtype, wire):
        raise TypeError(
            f"{what}: Horovod's core (the engine of this job) cannot sum bfloat16. Use float16 "
            "(hvd.Compression.fp16), or the native engine (HVDKIT_ENGINE=native)."
        )
    return wire
