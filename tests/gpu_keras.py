"""What ranks on GPUs do for tests/test_gpu.py, with Keras on a backend."""

from __future__ import annotations

from typing import Any

import keras
import keras_training

from hvdkit.world import read_world


def train(device: str) -> str:
    """Train with fit() as one process does with the whole batch; AssertionError for a difference above 1e-5.

    Returns where the backend computes: "cpu", "gpu" or "cuda". If that is not the device nothing is trained.
    """
    place = {"jax": _prepare_jax, "tensorflow": _prepare_tensorflow, "torch": _prepare_torch}[keras.backend.backend()]()
    if (place == "cpu") == (device == "cpu"):
        keras_training.train({"name": "SGD", "learning_rate": 0.05, "momentum": 0.9})
    return place


def _prepare_jax() -> str:
    import jax

    config: Any = jax.config
    config.update("jax_default_matmul_precision", "highest")
    seen = jax.local_devices()
    config.update("jax_default_device", _own(seen))
    return str(seen[0].platform)


def _prepare_tensorflow() -> str:
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    seen = tf.config.list_physical_devices("GPU")
    if seen:
        tf.config.set_visible_devices(_own(seen), "GPU")
        tf.config.experimental.set_memory_growth(_own(seen), True)
    return "gpu" if seen else "cpu"


def _prepare_torch() -> str:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.is_available():
        torch.cuda.set_device(_own(range(torch.cuda.device_count())))
    return str(torch.zeros(1, device=keras.src.backend.torch.core.get_device()).device.type)


def _own(seen: Any) -> Any:
    """The one of the devices that this rank is to use."""
    return seen[(read_world().local_rank or 0) % len(seen)]
