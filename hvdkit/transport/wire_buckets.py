"""Reductions in steps over a wire: of whole buckets in ordinary memory, or of what has to cross between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hvdkit.transport.base import Arithmetic, BucketSpec, Buffer, plan_depth, see_as
from hvdkit.transport.buckets import SteppedBuckets
from hvdkit.transport.coding import Coder, open_coder, sent_bytes
from hvdkit.transport.steps import reduce_steps
from hvdkit.transport.wire import Wire


class WireCrossing:
    """Reductions in steps over all ranks of a wire, which is this one's alone; opened by all of them together.

    A wire of its own, because steps may run in another thread than a transport's collectives, and those too want the
    same order on all ranks.
    """

    def __init__(self, wire: Wire, arithmetic: Arithmetic) -> None:
        self._wire, self._arithmetic = wire, arithmetic

    def __call__(
        self,
        source: Buffer,
        out: Buffer,
        spec: BucketSpec,
        prescale: float = 1.0,
        *,
        coder: Coder | None = None,
    ) -> Iterator[bool]:
        """Reduce `source` into `out`; see reduce_steps. spec.prescale has been applied, or is passed as `prescale`."""
        if coder is None:
            yield from reduce_steps(self._wire, source, out, spec, arithmetic=self._arithmetic, prescale=prescale)
            return
        if prescale != 1.0:
            self._arithmetic.combine(out, [source], scale=prescale)
            source = out
        yield from coder.steps(self._wire, source, out)
        if spec.postscale != 1.0:
            self._arithmetic.combine(out, [out], scale=spec.postscale)

    def close(self, *, idle: bool = True) -> None:
        """Close the wire; collective. idle: False if a reduction has failed half-way."""
        self._wire.close(idle=idle)


class WireBuckets(SteppedBuckets):
    """Buckets in ordinary memory, each reduced over all ranks of a wire; opened by all ranks together.

    check: see SteppedBuckets.
    """

    def __init__(
        self, crossing: WireCrossing, specs: Sequence[BucketSpec], depth: int | None, check: Callable[[], None]
    ) -> None:
        super().__init__(check)
        self._specs = list(specs)
        self._crossing = crossing
        self.depth, nbytes = plan_depth(specs, depth)
        pieces = [np.empty(nbytes, np.uint8) for _ in range(self.depth)]
        self.memory = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.own = [(0, 0)] * len(specs)
        self._coders = [open_coder(spec, (0, spec.count)) for spec in specs]
        self.sent_bytes = sum(map(sent_bytes, specs, self._coders, self.memory))

    def steps(self, index: int, elsewhere: Sequence[tuple[int, Buffer]]) -> Iterator[bool]:
        """See SteppedBuckets."""
        spec, memory = self._specs[index], self.memory[index]
        return self._crossing(memory, memory, spec, spec.prescale, coder=self._coders[index])

    def close(self) -> None:
        """See Buckets.close."""
        idle = not self.busy
        super().close()
        self._crossing.close(idle=idle)
        self.memory, self.own = [], []
