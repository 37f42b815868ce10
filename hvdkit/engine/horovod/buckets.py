"""Buckets whose reduction is one allreduce of Horovod's each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hvdkit.engine.horovod.binding import Binding, Call
from hvdkit.errors import TransportError
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import ALLREDUCE, BucketSpec, InPlaceSegment, Phases, SteppedBuckets, plan_memory, see_as
from hvdkit.transport.buffer import Narrow, make_buffer
from hvdkit.transport.coding.api import Coding


class HorovodBuckets(SteppedBuckets):
    """See Buckets; start() only. Horovod's own report says who is missing, so nothing looks after the peers here.

    call: an allreduce, with the beginning of its name. arithmetic: casts to a 16-bit wire dtype, in which Horovod then
    adds; so the factors of an average all come before. Raises TypeError for what Horovod's core cannot add or send.
    """

    def __init__(
        self, binding: Binding, call: Call, specs: Sequence[BucketSpec], depth: int | None, arithmetic: Arithmetic
    ) -> None:
        super().__init__(check=lambda: None)
        for spec in specs:
            binding.check_reduced("allreduce", spec.dtype)
            check_wire("compression is bf16", spec.dtype, spec.wire)
        pieces = [np.zeros(size, np.uint8) for size in plan_memory(specs, depth)]
        self.depth = len(pieces)
        self.memory = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.owned = self.shard = [(0, 0)] * len(specs)
        self.sent_bytes = sum(memory.nbytes for memory in self.memory)
        self._binding, self._call, self._specs, self._arithmetic = binding, call, specs, arithmetic
        self._narrow = [None if spec.narrow == "none" else make_buffer(spec.count, spec.narrow) for spec in specs]

    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """See SteppedBuckets. Raises TransportError for a single phase."""
        if phases != ALLREDUCE:
            raise TransportError(
                "Horovod's core reduces whole buckets: reduce_scatter() and all_gather() of a bucket are hvdkit's own. "
                "Leave HVDKIT_ENGINE=horovod out, or reduce whole buckets with start()."
            )
        return self._allreduce(index)

    def _allreduce(self, index: int) -> Iterator[bool]:
        spec, buffer, narrow = self._specs[index], self.memory[index], self._narrow[index]
        call = replace(self._call, name=f"{self._call.name}.{index}", op=spec.op)
        if narrow is None:
            call = replace(call, prescale=spec.prescale, postscale=spec.postscale)
        else:
            self._arithmetic.cast(narrow, buffer, spec.prescale * spec.postscale)
        request = self._binding.start(call, [(narrow or buffer).array])
        while not request.done():
            yield True
        request.result()
        if narrow is not None:
            self._arithmetic.cast(buffer, narrow)


def check_wire(what: str, dtype: str, wire: Narrow | Coding) -> Narrow:
    """The dtype in which numbers of `dtype` are sent; TypeError for coded ones, and for sums of bfloat16.

    what: is reduced so, for the message.
    """
    if not isinstance(wire, str):
        raise TypeError(
            f"compression is {wire!r}: Horovod's core, which is the engine here, sends numbers as they are or as "
            f"float16. Use hvd.Compression.fp16, or hvdkit's own engine (HVDKIT_ENGINE=native)."
        )
    if "bfloat16" in (dtype, wire):
        raise TypeError(
            f"{what}: Horovod's core, which is the engine here, cannot add bfloat16. Use float16 "
            f"(hvd.Compression.fp16), or hvdkit's own engine (HVDKIT_ENGINE=native)."
        )
    return wire
