"""The user's `compression`: a wire dtype or coding for all gradients, or for each gradient by its name.

The compressors are the same classes for all frameworks. An adapter registers a Casts for its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

from hvdkit.engine.reduce_op import Average, ReduceOp
from hvdkit.transport.buffer import Narrow
from hvdkit.transport.coding.api import Coding
from hvdkit.transport.coding.blocks import Int8, Sign
from hvdkit.transport.coding.power_sgd import PowerSGD
from hvdkit.transport.coding.top_k import TopK

Wire = Narrow | Coding

#: An optimizer's `compression` besides an adapter's compressors: a coding, or patterns of names -> compression.
Coded = Coding | Mapping[str, Any]

CODINGS = (TopK, PowerSGD, Sign, Int8)

Factors = tuple[float, float]
_WIDE = ("float32", "float64")
_LARGEST: dict[str, float] = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}


class Casts(Protocol):
    """The framework functions that compressors use. dtypes are names, such as "float32"."""

    def owns(self, tensor: Any) -> bool:
        """Return whether it is a tensor of this framework."""

    def dtype_of(self, tensor: Any) -> str:
        """Return the name of the tensor's dtype."""

    def clamp(self, tensor: Any, limit: float) -> Any:
        """Return the tensor with finite values limited to -limit and limit; infinities and NaN stay."""

    def cast(self, tensor: Any, dtype: str) -> Any:
        """Return the tensor in another dtype."""


_registered: list[Casts] = []


def register_casts(casts: Casts) -> None:
    """Register the Casts of a framework, so that compressors support its tensors; its adapter calls this once."""
    _registered.append(casts)


def _casts_for(tensor: Any) -> Casts:
    for casts in _registered:
        if casts.owns(tensor):
            return casts
    raise TypeError(
        "Compression needs a tensor of a framework whose hvdkit module is imported (hvdkit.torch, "
        f"hvdkit.tensorflow, ...), not {type(tensor).__name__}."
    )


class Compressor:
    """A wire dtype, with Horovod's compress() and decompress() for direct calls.

    wire: the dtype in which float32 and float64 are sent between hosts.
    """

    wire: ClassVar[Narrow] = "none"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the wire dtype, and the context for decompress(): the name of its own dtype."""
        casts = _casts_for(tensor)
        dtype = casts.dtype_of(tensor)
        if cls.wire == "none" or dtype not in _WIDE:
            return tensor, dtype
        return casts.cast(casts.clamp(tensor, _LARGEST[cls.wire]), cls.wire), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its original dtype."""
        return _casts_for(tensor).cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Send tensors unchanged."""


class FP16Compressor(Compressor):
    """Send float16, with values from 6e-8 to 65504. Larger finite values become 65504, values below 3e-8 become 0.

    Sums are computed in float32, and averages are divided after the sum. Horovod's core computes both in float16.
    """

    wire = "float16"


class BF16Compressor(Compressor):
    """Send bfloat16: the range of float32 with 8 bits of precision. Sums are computed in float32."""

    wire = "bfloat16"


class Compression:
    """The compressors: `none`, `fp16` and, beyond Horovod, `bf16`, `TopK`, `PowerSGD`, `Sign` and `Int8`.

    Only data between hosts is compressed, because shared memory inside a host is faster than a cast. The last four are
    for the gradients of an optimizer. `compression=hvd.Compression.TopK(0.01)` applies to all gradients. A dict selects
    by the names of parameters, and the first matching pattern applies: `{"embedding.*": hvd.Compression.TopK(0.01),
    "*": hvd.Compression.fp16}`.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    TopK = TopK
    PowerSGD = PowerSGD
    Sign = Sign
    Int8 = Int8


def reduce_compressed(
    compression: type[Compressor],
    tensors: Sequence[Any],
    op: ReduceOp,
    factors: Factors,
    set_size: int,
    reduce: Callable[[Sequence[Any], ReduceOp, Factors], Sequence[Any]],
) -> Sequence[Any]:
    """Compress the tensors, reduce them, and decompress the results.

    An average is divided after the sum, which is computed in float32: values that the wire dtype can represent are not
    lost, and the sum is finite if the average is. So an average's factors are applied before tensors are cast to the
    wire dtype. bfloat16, whose sum may exceed float32, is sent divided by the power of two that is `set_size` rounded
    up; this division is exact. If some tensors of a group are not compressed, `reduce` does both: factors and division.

    compression: the compressor.
    tensors: of a framework with registered Casts.
    op: the reduction.
    factors: prescale and postscale.
    set_size: number of ranks.
    reduce: reduces the compressed tensors with the op and the factors that it gets.
    """
    wire = wire_of(compression)
    if wire == "none":
        return reduce(tensors, op, factors)
    kinds = [(casts := _casts_for(tensor), casts.dtype_of(tensor) in _WIDE) for tensor in tensors]
    if op is Average and all(wide for _, wide in kinds):
        before, shift = factors[0] * factors[1], 1.0
        if wire == "bfloat16":
            shift = 0.5 ** (set_size - 1).bit_length()
        if before != 1.0 or shift != 1.0:
            pairs = zip(tensors, kinds, strict=True)
            tensors = [casts.clamp(tensor * before, _LARGEST[wire]) * shift for tensor, (casts, _) in pairs]
        factors = (1.0, 1 / shift)
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = reduce([tensor for tensor, _ in compressed], op, factors)
    return [compression.decompress(result, dtype) for result, (_, dtype) in zip(results, compressed, strict=True)]


@dataclass(frozen=True)
class Policy:
    """Selects the wire dtype or coding by a tensor's name. rules: (pattern, wire); the first match applies."""

    rules: tuple[tuple[str, Wire], ...]

    def wire_for(self, name: str) -> Wire:
        """Return the wire of a tensor. Raises ValueError if no pattern matches its name.

        An adapter's number before a name is ignored.
        """
        plain = name.partition(" ")[2] if name.partition(" ")[0].isdigit() else name
        for pattern, wire in self.rules:
            if fnmatchcase(plain, pattern):
                return wire
        patterns = ", ".join(repr(pattern) for pattern, _ in self.rules)
        raise ValueError(
            f"compression has no pattern for {plain!r}; its patterns are {patterns}. Add '*' as the last pattern, "
            "for all other names."
        )


def wire_of(compression: Any) -> Narrow:
    """Return a compressor's wire dtype. Raises TypeError for other objects, such as a user's own Horovod compressor."""
    wire = getattr(compression, "wire", None)
    if wire not in ("none", "float16", "bfloat16"):
        raise TypeError(_refuse(compression, "use hvd.Compression.none, hvd.Compression.fp16 or hvd.Compression.bf16"))
    return wire  # type: ignore[no-any-return]


def wire_of_gradients(compression: Any) -> Wire | Policy:
    """Return the wire of an optimizer's gradients: a dtype as wire_of() does, a coding, or a Policy for a mapping."""
    if isinstance(compression, Mapping):
        return Policy(tuple((str(pattern), _wire(one)) for pattern, one in compression.items()))
    return _wire(compression)


def _wire(compression: Any) -> Wire:
    if isinstance(compression, type) and issubclass(compression, CODINGS):
        raise TypeError(
            f"compression is the class {compression.__name__}; pass an object of it, for example "
            f"hvd.Compression.{compression()!r}."
        )
    if isinstance(compression, CODINGS):
        return compression
    try:
        return wire_of(compression)
    except TypeError:
        ways = ["none", "fp16", "bf16", *(repr(kind()) for kind in CODINGS)]
        hint = "use " + ", ".join(f"hvd.Compression.{way}" for way in ways)
        raise TypeError(_refuse(compression, hint)) from None


def _refuse(compression: Any, hint: str) -> str:
    if isinstance(compression, (*CODINGS, Mapping)):
        return f"compression={compression!r} is for the gradients of an optimizer only. For this call, {hint}."
    return (
        f"compression={compression!r} is not supported; {hint}. hvdkit does not call custom compressors of Horovod, "
        "because it casts the data itself before it sends them."
    )
