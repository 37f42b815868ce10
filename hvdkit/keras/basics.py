"""init, describe and the like, for Keras scripts."""

from __future__ import annotations

import dataclasses

import keras

from hvdkit.engine.basics import Framework
from hvdkit.engine.cores import count_cores
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.keras.loading import watch_fit
from hvdkit.transport.nccl import opened_version

RECORDER.when_on(watch_fit)


def _no_arithmetic() -> None:
    """Keep numpy's arithmetic: JAX's, called in a callback of a JAX program, might deadlock."""


def _backend(name: str) -> Framework:
    """Return the adapter's description of Keras's backend."""
    if name == "torch":
        from hvdkit.torch.basics import FRAMEWORK

        return FRAMEWORK
    if name == "tensorflow":
        from hvdkit.tensorflow.basics import FRAMEWORK

        return FRAMEWORK
    return Framework("", "", _no_arithmetic, count_cores, cuda=False, rocm=False, nccl=opened_version)


_NAME = keras.backend.backend()
FRAMEWORK = dataclasses.replace(_backend(_NAME), label=f"keras {keras.__version__} on {_NAME}")
init, describe = FRAMEWORK.init, FRAMEWORK.describe
cuda_built, rocm_built = FRAMEWORK.cuda_built, FRAMEWORK.rocm_built
