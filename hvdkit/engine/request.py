"""What is asked of the engine: the operation, its factors and what goes over the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvdkit.engine.reduce_op import Average, Sum

Wire = Literal["none", "float16", "bfloat16"]


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are reduced.

    average: divide the sum by the number of ranks. predivide: the part of that division (1.0 or above) that is done
    before the sum crosses between hosts, against overflow of narrow wire types; 0 leaves the choice to the engine.
    wire: dtype between hosts.
    """

    average: bool = True
    predivide: float = 0.0
    wire: Wire = "none"

    def factors(self, size: int, local_ranks: int) -> tuple[float, float]:
        """Prescale and postscale for `size` ranks; their product is 1/size for an average and 1 for a sum.

        local_ranks: how many ranks' sum crosses between hosts as one.
        """
        if not self.average:
            return 1.0, 1.0
        # By default what crosses is the mean of a host: as large as a gradient, so it neither overflows nor vanishes.
        before = self.predivide or float(local_ranks)
        return 1.0 / before, before / size

    def wire_for(self, dtype: str) -> Wire:
        """The wire's dtype for a bucket of this dtype: only wider floats are narrowed."""
        return self.wire if dtype in ("float32", "float64") else "none"

    def __str__(self) -> str:
        what = "average" if self.average else "sum"
        return f"{what}, predivided by {self.predivide:g}, {self.wire} on the wire"


def wire_of(compression: Any) -> Wire:
    """The wire dtype of a compressor; TypeError for something else, such as a Horovod compressor of the user's own."""
    wire = getattr(compression, "wire", None)
    if wire not in ("none", "float16", "bfloat16"):
        raise TypeError(
            f"compression is {compression!r}; use hvd.Compression.none, hvd.Compression.fp16 or hvd.Compression.bf16. "
            f"Compressors written for Horovod are not called by hvdkit, which casts on the wire itself."
        )
    return wire  # type: ignore[no-any-return]


def gradient_options(op: Any, predivide: float, compression: Any) -> ReduceOptions:
    """How gradients are reduced, in a user's words: `op`, `gradient_predivide_factor` and `compression`.

    Raises ValueError or TypeError, saying which of them cannot be used.
    """
    if predivide != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average only; leave it out, or use Average.")
    if op not in (Average, Sum):
        raise ValueError(f"op is {op!r}; gradients are reduced with hvd.Average or hvd.Sum.")
    if predivide <= 0:
        raise ValueError(f"gradient_predivide_factor is {predivide}; it must be above 0.")
    return ReduceOptions(
        average=op is Average, predivide=0.0 if predivide == 1.0 else float(predivide), wire=wire_of(compression)
    )
