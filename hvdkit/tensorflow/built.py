"""Horovod's questions about how it was built: the engine's answers, and those that only TensorFlow knows."""

from __future__ import annotations

import tensorflow as tf

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
    """Was TensorFlow built for CUDA? Then hvdkit reduces its GPU tensors, through the host's memory for now."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Was TensorFlow built for ROCm?"""
    return bool(tf.test.is_built_with_rocm())


def gpu_available() -> bool:
    """Does TensorFlow see a GPU?"""
    return bool(tf.config.list_physical_devices("GPU"))


__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "is_homogeneous",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]
