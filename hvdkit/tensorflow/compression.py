"""What goes over the wire between hosts, under Horovod's names."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from hvdkit.engine.compression import Codings
from hvdkit.transport.buffer import Narrow


class Compressor:
    """One way to make a tensor smaller on the wire.

    wire: the dtype that the engine sends. compress and decompress do the same to a tensor by hand, as in Horovod.
    """

    wire: ClassVar[Narrow] = "none"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor as it is sent, and what `decompress` needs to undo it."""
        if cls.wire == "none" or tensor.dtype not in (tf.float32, tf.float64):
            return tensor, tensor.dtype
        return tf.cast(clamp(tensor, tf.as_dtype(cls.wire).max), cls.wire), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The tensor in its own dtype again."""
        return tf.cast(tensor, ctx)


def clamp(tensor: Any, largest: Any) -> Any:
    """The tensor with finite values within -largest and largest; infinite ones stay."""
    limit = tf.constant(float(largest), tensor.dtype)
    return tf.where(tf.math.is_inf(tensor), tensor, tf.clip_by_value(tensor, -limit, limit))


class NoneCompressor(Compressor):
    """Send tensors as they are."""


class FP16Compressor(Compressor):
    """Send float16; finite values beyond 65504 become 65504. Sums are taken in float32."""

    wire = "float16"


class BF16Compressor(Compressor):
    """Send bfloat16: the range of float32 with 8 bits of precision. Sums are taken in float32."""

    wire = "bfloat16"


class Compression(Codings):
    """The compressors: `none`, `fp16`, and what Horovod does not have: `bf16`, and codings (see there).

    Only what crosses between hosts is compressed: memory inside a host is faster than any cast.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
