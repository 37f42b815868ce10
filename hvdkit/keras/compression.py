"""What goes over the wire between hosts, under Horovod's names."""

from __future__ import annotations

from typing import Any, ClassVar

import keras

from hvdkit.engine.compression import Codings
from hvdkit.transport.buffer import Narrow


class Compressor:
    """One way to make a tensor smaller on the wire.

    wire: the dtype that the engine sends. compress and decompress do the same to a tensor by hand, as in Horovod.
    """

    wire: ClassVar[Narrow] = "none"
    largest: ClassVar[float] = 0.0

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor as it is sent, and what `decompress` needs to undo it."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if cls.wire == "none" or dtype not in ("float32", "float64"):
            return tensor, dtype
        clamped = keras.ops.where(keras.ops.isinf(tensor), tensor, keras.ops.clip(tensor, -cls.largest, cls.largest))
        return keras.ops.cast(clamped, cls.wire), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The tensor in its own dtype again."""
        return keras.ops.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Send tensors as they are."""


class FP16Compressor(Compressor):
    """Send float16; finite values beyond 65504 become 65504. Sums are taken in float32."""

    wire = "float16"
    largest = 65504.0


class BF16Compressor(Compressor):
    """Send bfloat16: the range of float32 with 8 bits of precision. Sums are taken in float32."""

    wire = "bfloat16"
    largest = float.fromhex("0x1.fep127")


class Compression(Codings):
    """The compressors: `none`, `fp16`, and what Horovod does not have: `bf16`, and codings (see there).

    Only what crosses between hosts is compressed: memory inside a host is faster than any cast.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
