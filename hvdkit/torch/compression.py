"""Horovod's module of compressors, and the casts of torch's tensors that they use."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    register_casts,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TorchCasts:
    """See Casts."""

    def owns(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor)

    def dtype_of(self, tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def clamp(self, tensor: torch.Tensor, limit: float) -> torch.Tensor:
        return torch.where(torch.isinf(tensor), tensor, tensor.clamp(-limit, limit))

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype))


register_casts(_TorchCasts())
