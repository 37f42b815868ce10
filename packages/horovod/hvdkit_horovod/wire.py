"""Wire dtypes of Horovod's core."""

from __future__ import annotations

from hvdkit.engine.api import Coding, Narrow


def check_wire(what: str, dtype: str, wire: Narrow | Coding) -> Narrow:
    """Return the wire dtype of `dtype`; TypeError for a coding, and for sums of bfloat16.

    what: name of the reduced tensors or of the option, for the message.
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
