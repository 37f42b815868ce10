"""init and describe, for Keras scripts."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import keras

from hvdkit.engine.basics import describe_world, join_world
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.keras.loading import watch_fit
from hvdkit.transport.arithmetic import Arithmetic

RECORDER.when_on(watch_fit)


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int] | Any] | str | None = None,
    **settings: Any,
) -> None:
    """Join the world that the launcher made. Every rank calls it, before any other call of hvdkit.

    comm: the processes that make the world, by default all of the job: a communicator of mpi4py's, or a list of ranks
    in MPI_COMM_WORLD, whose order is that of the ranks here. Only these processes call init(); the others start MPI.
    A list of communicators is the world and, after it, process sets.
    process_sets: sets, lists of ranks or communicators, to be known from the beginning; "dynamic" is not needed for
    later ones.
    settings: fields of hvdkit.Config, e.g. transport="mpi"; they beat the environment.
    Raises WorldError if launcher and MPI disagree about the number of ranks, ConfigError for a bad setting or
    a comm that cannot be a world, ValueError for process sets that cannot be made.
    """
    name = keras.backend.backend()
    join_world(comm, process_sets, _arithmetic(name), name if name in ("torch", "tensorflow") else "", **settings)


def _arithmetic(backend: str) -> Arithmetic | None:
    """The fastest for 16-bit numbers: PyTorch's, TensorFlow's, or numpy's (None).

    On JAX that is numpy's. JAX's own would run from within a callback of a JAX program, which may wait for ever.
    """
    if backend == "torch":
        return importlib.import_module("hvdkit.torch.tensors").TorchArithmetic()  # type: ignore[no-any-return]
    if backend == "tensorflow":
        return importlib.import_module("hvdkit.tensorflow.arithmetic").TensorflowArithmetic()  # type: ignore[no-any-return]
    return None


def describe() -> str:
    """Say in a line what runs where: ranks, hosts, transport and threads; collective, the same text on every rank.

    Example: "4 ranks on 2 hosts (node1: 2, node2: 2), hierarchical transport, keras 3.15.1 on jax, 2 threads a rank".
    """
    name = keras.backend.backend()
    threads = os.cpu_count() or 1
    if name == "torch":
        threads = importlib.import_module("torch").get_num_threads()
    elif name == "tensorflow":
        config = importlib.import_module("tensorflow").config.threading
        threads = config.get_intra_op_parallelism_threads() or threads
    return describe_world(f"keras {keras.__version__} on {name}", threads)


def cuda_built() -> bool:
    """Was the backend built for CUDA? For TensorFlow and PyTorch; False on JAX, which is told by its devices."""
    return _built("cuda_built")


def rocm_built() -> bool:
    """Was the backend built for ROCm? As cuda_built."""
    return _built("rocm_built")


def _built(question: str) -> bool:
    name = keras.backend.backend()
    return name in ("tensorflow", "torch") and bool(
        getattr(importlib.import_module(f"hvdkit.{name}.built"), question)()
    )
