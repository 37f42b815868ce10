"""init and describe, for TensorFlow scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine.basics import describe_world, join_world
from hvdkit.engine.cores import count_cores
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.tensorflow.arithmetic import TensorflowArithmetic
from hvdkit.tensorflow.loading import watch_datasets

RECORDER.when_on(watch_datasets)


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int] | Any] | str | None = None,
    **settings: Any,
) -> None:
    """Join the world that the launcher made. Every rank calls it, before any other call of hvdkit.

    comm: the processes that make the world, by default all of the job: a communicator of mpi4py's, or a list of ranks
    in MPI_COMM_WORLD, whose order is that of the ranks here. Only these processes call init(); the others start MPI.
    A list of communicators is the world and, after it, process sets.
    process_sets: sets, lists of ranks or communicators, to be known from the beginning, each once;
    "dynamic", which Horovod wants for later ones, is not needed.
    settings: fields of hvdkit.Config, e.g. transport="mpi"; they beat the environment.
    Raises WorldError if launcher and MPI disagree about the number of ranks, ConfigError for a bad setting or
    a comm that cannot be a world, ValueError for process sets that cannot be made.
    """
    join_world(comm, process_sets, TensorflowArithmetic(), "tensorflow", **settings)


def describe() -> str:
    """Say in a line what runs where: ranks, hosts, transport and threads; collective, the same text on every rank.

    Example: "4 ranks on 2 hosts (node1: 2, node2: 2), hierarchical transport, tensorflow 2.21.0, 1 thread a rank".
    Raises NotInitializedError before init().
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads() or count_cores()
    return describe_world(f"tensorflow {tf.__version__}", threads)
