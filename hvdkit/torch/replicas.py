"""Checksums of torch's tensors, where they lie."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

from hvdkit.torch.collective import own_memory

_WORDS = 1 << 20  # of 4 bytes, that are worked on at a time on a device
_MIX = 0x9E3779B97F4A7C1  # odd, and its bits are all over the place


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, int]]:
    """(name, checksum) of each tensor, of any device, dtype and shape; a device is waited for at the end only."""
    found = [(name, _on_device(one) if one.is_cuda else _on_host(one)) for name, one in named]
    return [(name, int(made)) for name, made in found]


def _on_host(tensor: torch.Tensor) -> int:
    memory: Any = own_memory(tensor).reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(memory)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of integers, the same in whatever order a device adds them; each place has a weight of its own."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.data_ptr() % 4 == 0 else flat
    weights = (torch.arange(min(_WORDS, words.numel()), device=words.device) * 2 + 1) * _MIX
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        total = total * 31 + (part * weights[: part.numel()]).sum()
    return total
