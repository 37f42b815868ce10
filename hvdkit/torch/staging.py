"""Gradients of a GPU on their way through pinned host memory, for transports that move host memory only."""

from __future__ import annotations

import torch

from hvdkit.log import logger


class StagedBucket:
    """A bucket's twin on a device. flat: (n,), where the gradients live.

    host: the bucket's memory (n,); it is pinned here, since copies from pageable memory are slower and not direct.
    """

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self._host = host
        self.flat = torch.zeros(host.numel(), dtype=host.dtype, device=device)
        self._pinned = device.type == "cuda" and _pin(host)

    def to_host(self) -> None:
        """Copy the gradients to the host; returns when they are there."""
        self._host.copy_(self.flat)

    def to_device(self) -> None:
        """Copy the reduced gradients back; later work on the current stream sees them."""
        self.flat.copy_(self._host, non_blocking=self._pinned)
        if self._pinned:
            # The host's memory is filled again in the next pass.
            torch.cuda.current_stream(self.flat.device).synchronize()

    def close(self) -> None:
        """Unpin the memory."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
            self._pinned = False


def _pin(host: torch.Tensor) -> bool:
    if not host.numel():
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0))
    if code:
        logger.warning("bucket memory could not be pinned (cudaHostRegister: %d); copies to the GPU are slower", code)
    return code == 0
