"""The options of a planned reduction: operation, factors and wire dtype or coding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.engine.compression import Policy, Wire, wire_of_gradients
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.reduce_op import Average, Sum
from hvdkit.transport.buffer import COMPLEX, FLOAT8


@dataclass(frozen=True)
class ReduceOptions:
    """Options of the reduction of gradients.

    average: divide the sum by the number of ranks.
    predivide: divisor (1.0 or above) that is applied before the sum crosses between hosts, against overflow of narrow
        wire dtypes; the rest of the division follows. 0 leaves the choice to the engine.
    wire: dtype or coding between hosts, for all tensors or by their names.
    """

    average: bool = True
    predivide: float = 0.0
    wire: Wire | Policy = "none"

    def factors(self, size: int, local_ranks: int) -> tuple[float, float]:
        """Return prescale and postscale for `size` ranks; their product is 1/size for an average and 1 for a sum.

        local_ranks: number of ranks whose gradients are summed before they cross between hosts; see Transport.
        """
        if not self.average:
            return 1.0, 1.0
        # By default the mean of a host crosses: it overflows only if the gradients do, and underflows to zero only if
        # the average would, which crosses too.
        before = self.predivide or float(local_ranks)
        return 1.0 / before, before / size

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if wire dtypes are selected by patterns and no pattern matches the name of a tensor."""
        for name in names:
            self.wire_for(name, "float32")

    def wire_for(self, name: str, dtype: str) -> Wire:
        """Return the wire dtype or coding of a tensor. Only float32 and float64 are compressed."""
        if dtype not in ("float32", "float64"):
            return "none"
        return self.wire.wire_for(name) if isinstance(self.wire, Policy) else self.wire

    def wire_for_tensor(self, tensor: TensorSpec) -> Wire:
        """Like wire_for(); a tensor with a shape that the coding does not support is sent uncompressed."""
        wire = self.wire_for(tensor.name, tensor.dtype)
        return wire if isinstance(wire, str) or wire.codes(tensor.shape) else "none"

    def __str__(self) -> str:
        what = "average" if self.average else "sum"
        return f"{what}, predivided by {self.predivide:g}, {self.wire} on the wire"


def check_gradient(name: str, dtype: str, *, engine: str = "", adasum: bool = False) -> None:
    """Raise TypeError for a trained tensor if its gradients cannot be summed in its dtype.

    name: of the tensor, for the message.
    dtype: of the tensor.
    engine: the title of an engine that cannot sum complex numbers; "" for hvdkit's own.
    adasum: Are the tensors' steps combined by Adasum?
    """
    if dtype in FLOAT8:
        raise TypeError(
            f"{name} is {dtype}, and its gradient would be too, but sums of {dtype} between ranks are not defined. "
            "Keep it in bfloat16 or float32 and cast it where it is used, or freeze it."
        )
    if dtype in COMPLEX and (engine or adasum):
        who = "Adasum" if adasum else f"{engine} (the engine of this job)"
        cure = "Use op=hvd.Average" if adasum else "Use the native engine (HVDKIT_ENGINE=native)"
        raise TypeError(
            f"{name} is {dtype}, which {who} cannot sum. {cure}, or train its real and imaginary parts as real "
            "tensors (torch.view_as_complex, tf.complex)."
        )


def gradient_options(op: Any, predivide: float, compression: Any) -> ReduceOptions:
    """Make ReduceOptions from the public arguments `op`, `gradient_predivide_factor` and `compression`.

    Raises ValueError or TypeError that names the invalid argument.
    """
    if predivide != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={predivide} needs op=hvd.Average, not {op!r}. Leave it out, or use "
            "op=hvd.Average."
        )
    if op not in (Average, Sum):
        raise ValueError(f"op is {op!r}; use hvd.Average or hvd.Sum for gradients.")
    if predivide <= 0:
        raise ValueError(f"gradient_predivide_factor is {predivide}; it must be above 0.")
    return ReduceOptions(
        average=op is Average,
        predivide=0.0 if predivide == 1.0 else float(predivide),
        wire=wire_of_gradients(compression),
    )
