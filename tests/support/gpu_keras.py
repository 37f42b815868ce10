"""What ranks on GPUs do for tests/gpu/test_gpu_keras.py, with Keras on a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import keras_training
import numpy as np
from gpu_copies import KNOWN, traced

import hvdkit.keras as hvd
from hvdkit.world import read_world

_WIDTH = 256


def train(device: str) -> str:
    """Train with fit() as one process does with the whole batch; AssertionError for a difference above 1e-5.

    Returns where the backend computes: "cpu", "gpu" or "cuda". If that is not the device nothing is trained.
    """
    place = _prepare()
    if (place == "cpu") == (device == "cpu"):
        keras_training.train({"name": "SGD", "learning_rate": 0.05, "momentum": 0.9})
    return place


def count_copies(device: str, traces: str, *, way: str = "fit") -> dict[str, Any]:
    """Trace steps, and a copy of KNOWN bytes to the host; returns what summarise() does, and two more.

    place: see train(); alone if that is not the device. gradient: bytes of the largest one. way: "fit", "eagerly" or,
    of hvdkit.tensorflow, "tape" and "tape in a graph". traces: a folder that is there.
    """
    place, backend = _prepare(), keras.backend.backend()
    if (place == "cpu") != (device == "cpu"):
        return {"place": place}
    transport = "torch" if backend == "torch" else "nccl" if device == "cuda" else "auto"
    hvd.init(device_transport=transport)
    model = keras.Sequential([keras.Input((_WIDTH,)), keras.layers.Dense(_WIDTH), keras.layers.Dense(1)])
    data = np.ones((12, _WIDTH), "float32"), np.ones((12, 1), "float32")
    steps = _tape_steps(model, data, graph="graph" in way) if "tape" in way else _fit_steps(model, data, way)
    steps()
    own = Path(traces, f"rank {hvd.rank()}")
    own.mkdir()
    with traced(backend, own) as found:
        steps()
        keras.ops.convert_to_numpy(keras.ops.ones(KNOWN // 4) * model.weights[0][0, 0])
    hvd.shutdown()
    return {"place": place, "gradient": 4 * _WIDTH**2, **found}


def _fit_steps(model: Any, data: tuple[Any, Any], way: str) -> Any:
    # On a GPU Keras has XLA compile the steps of TensorFlow, unless it is told not to.
    compiled = False if keras.backend.backend() == "tensorflow" else "auto"
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4))
    model.compile(optimizer, "mse", run_eagerly=way == "eagerly", jit_compile=compiled)
    return lambda: model.fit(*data, batch_size=4, verbose=0)


def _tape_steps(model: Any, data: tuple[Any, Any], *, graph: bool) -> Any:
    import tensorflow as tf

    import hvdkit.tensorflow as hvd_tensorflow

    optimizer = keras.optimizers.SGD(1e-4)
    inputs, targets = map(tf.constant, data)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        gradients = hvd_tensorflow.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if graph else step
    return lambda: [run() for _ in range(3)]


def _prepare() -> str:
    """Give this rank its device; returns where the backend computes."""
    prepare = {"jax": _prepare_jax, "tensorflow": _prepare_tensorflow, "torch": _prepare_torch}
    return prepare[keras.backend.backend()]()


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
