"""Checksums of torch's tensors, computed on the device that holds each tensor."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

from hvdkit.torch.collective import own_memory
from hvdkit.torch.tensors import as_array

_WORDS = 1 << 20  # number of 4-byte words that a device processes at a time
_MIX = 0x9E3779B97F4A7C1  # odd, with well mixed bits


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, int]]:
    """Return (name, checksum) of each tensor, of any device, dtype and shape; waits for devices only at the end."""
    found = [(name, _on_host(one) if one.is_cpu else _on_device(one)) for name, one in named]
    return [(name, int(made)) for name, made in found]


def _on_host(tensor: torch.Tensor) -> int:
    memory: Any = as_array(own_memory(tensor).reshape(-1).view(torch.uint8), "uint8")
    return zlib.crc32(memory)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weighted sum of the integers; it does not depend on the order in which the device adds."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.data_ptr() % 4 == 0 else flat
    weights = (torch.arange(min(_WORDS, words.numel()), device=words.device) * 2 + 1) * _MIX
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        total = total * 31 + (part * weights[: part.numel()]).sum()
    return total
