"""Pinned host memory for gradients of a GPU, for transports that move host memory only."""

from __future__ import annotations

import torch

from hvdkit.log import logger


def is_staged(device: torch.device) -> bool:
    """Return whether memory of this device must be copied to the host before it can be sent."""
    return device.type != "cpu"


class PinnedMemory:
    """Host memory that a GPU copies from and to directly; pageable memory is slower."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def add(self, host: torch.Tensor) -> None:
        """Pin the memory of a tensor that stays where it is; does nothing the second time, or without CUDA."""
        address = host.data_ptr()
        if address in self._known or not host.numel() or not torch.cuda.is_available():
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, host.numel() * host.element_size(), 0))
        self._known[address] = code == 0
        if code:
            logger.info(
                "Bucket memory could not be pinned (cudaHostRegister returned error %d). Copies to and from the GPU "
                "are slower.",
                code,
            )

    def close(self) -> None:
        """Unpin all memory."""
        for address, pinned in self._known.items():
            if pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._known.clear()
