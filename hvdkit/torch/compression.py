"""What goes over the wire between hosts, under Horovod's names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hvdkit.engine.compression import Codings
from hvdkit.transport.buffer import Narrow


class Compressor:
    """One way to make a tensor smaller on the wire.

    wire: the dtype that the engine sends. compress and decompress do the same to a tensor by hand, as in Horovod.
    """

    wire: ClassVar[Narrow] = "none"

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as it is sent, and what `decompress` needs to undo it."""
        if cls.wire == "none" or tensor.dtype not in (torch.float32, torch.float64):
            return tensor, tensor.dtype
        dtype = getattr(torch, cls.wire)
        largest = torch.finfo(dtype).max
        clamped = torch.where(torch.isinf(tensor), tensor, tensor.clamp(-largest, largest))
        return clamped.to(dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its own dtype again."""
        return tensor.to(ctx)


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
