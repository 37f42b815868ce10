"""init and describe, for PyTorch scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.engine.basics import describe_world, join_world, local_rank
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.torch.loading import watch_loaders
from hvdkit.torch.tensors import TorchArithmetic

RECORDER.when_on(watch_loaders)


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
    join_world(comm, process_sets, TorchArithmetic(), "torch", **settings)


def local_device() -> torch.device:
    """The device of this rank: a GPU that is its own as far as there are enough, or the CPU where torch sees none.

    Right where the launcher shows each rank one GPU, some of its own, or all GPUs of the host: it is number
    `local_rank() % torch.cuda.device_count()` of those that this process sees. NotInitializedError before init().
    """
    place = local_rank()
    seen = torch.cuda.device_count()
    return torch.device("cuda", place % seen) if seen else torch.device("cpu")


def describe() -> str:
    """Say in a line what runs where: ranks, hosts, transport and threads; collective, the same text on every rank.

    NotInitializedError before init().
    Example: "4 ranks on 2 hosts (node1: 2, node2: 2), hierarchical transport, torch 2.13.0, 1 thread a rank".
    """
    return describe_world(f"torch {torch.__version__}", torch.get_num_threads())
