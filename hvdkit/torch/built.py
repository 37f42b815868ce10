"""Horovod's questions about how it was built: the engine's answers, and those that only torch knows."""

from __future__ import annotations

import torch

from hvdkit.engine.built import (
    ccl_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
)


def cuda_built() -> bool:
    """Was torch built for CUDA? Then hvdkit reduces its CUDA tensors, through the host's memory for now."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Was torch built for ROCm? Its GPU tensors are cuda tensors to torch, and to hvdkit."""
    return torch.version.hip is not None


__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]
