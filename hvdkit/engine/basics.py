"""Ranks, sizes, process sets, join() and the timeline, as every adapter offers them."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import ProcessSet, check_process_set, global_process_set
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import ConfigError
from hvdkit.log import logger
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.polling import Backoff
from hvdkit.transport.rank_subset import is_communicator, read_rank_subset
from hvdkit.world import World, read_world


@dataclass(frozen=True)
class Framework:
    """A framework as its adapter describes it, with the adapter's calls that depend on it.

    name: of the framework whose build of Horovod's core is loaded; "" for none in particular.
    label: name and version of the framework, for describe().
    arithmetic: makes the fastest Arithmetic for adding and casting 16-bit numbers, or returns None for numpy's.
    count_threads: returns the number of threads that compute in a rank.
    cuda: Was the framework built for CUDA?
    rocm: Was it built for ROCm?
    nccl: returns the version of NCCL that reduces GPU tensors; None until NCCL has reduced one.
    """

    name: str
    label: str
    arithmetic: Callable[[], Arithmetic | None]
    count_threads: Callable[[], int]
    cuda: bool
    rocm: bool
    nccl: Callable[[], tuple[int, int, int] | None]

    def init(
        self,
        comm: Sequence[Any] | Any | None = None,
        process_sets: Sequence[ProcessSet | Sequence[int] | Any] | str | None = None,
        **settings: Any,
    ) -> None:
        """Initialize hvdkit and connect the ranks. Every rank calls it, before any other call of hvdkit.

        comm: the processes of the world; None for all processes of the job. It is an mpi4py communicator or a list of
        ranks in MPI_COMM_WORLD, whose order is the order of hvdkit's ranks. Only these processes may call init(); the
        others must start MPI. In a list of communicators, the first is the world and the others are process sets.
        process_sets: ProcessSets, lists of ranks or communicators to add at the start, each once. "dynamic", which
        Horovod needs for process sets that are added later, is accepted and not needed.
        settings: fields of hvdkit.Config, for example transport="mpi". They take precedence over environment variables.
        The value None is the same as leaving the argument out.
        Raises WorldError if the launcher and MPI disagree about the number of ranks, ConfigError for an invalid setting
        or a comm that cannot be a world, TypeError for an unknown setting, ValueError for an invalid process set: the
        world is initialized then, without the process sets of this call, and init() may be called again with others.
        """
        sets = () if process_sets is None or isinstance(process_sets, str) else tuple(process_sets)
        if isinstance(comm, Sequence) and any(is_communicator(ranks) for ranks in comm):
            if not all(is_communicator(ranks) for ranks in comm):
                raise ConfigError(
                    f"init(comm={comm!r}) mixes mpi4py communicators with other objects. Pass one communicator, a "
                    "list of ranks, or a list of communicators, of which the first is the world and the others are "
                    "process sets."
                )
            comm, sets = comm[0], (*comm[1:], *sets)
        subset = read_rank_subset(comm, read_world())
        known = [ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks) for ranks in sets]
        first = not engine.is_initialized()
        try:
            engine.init(known, arithmetic=self.arithmetic(), framework=self.name, subset=subset, **settings)
        finally:
            if first and engine.is_initialized():  # also where process sets were refused
                global_process_set.mpi_comm = comm if is_communicator(comm) else None
        if first:
            self._warn_of_torch_settings(engine.runtime("init()"))

    def _warn_of_torch_settings(self, runtime: engine.Runtime) -> None:
        """Warn on rank 0 of settings for PyTorch's tensors in a job of another framework."""
        config = runtime.config
        if self.name == "torch" or runtime.world.rank:
            return
        if config.device_transport == "torch":
            text = "device_transport=torch"
        elif config.device_sums != "library" and config.device_transport != "host":
            text = f"device_sums={config.device_sums}"
        else:
            return
        logger.warning(
            "%s is for tensors of PyTorch, and this is %s: it has no effect on tensors of the CPU, and is an error for "
            "gradients on GPUs. Leave it out.",
            *(text, self.label),
        )

    def describe(self) -> str:
        """Describe the job in one line: ranks, hosts, transport and threads. Collective; the same text on every rank.

        Example: "4 ranks on 2 hosts (node1: 2, node2: 2), hierarchical transport, torch 2.13.0, 1 thread per rank".
        After NCCL has reduced GPU tensors, the line also contains NCCL's version.
        Raises NotInitializedError before init().
        """
        runtime = engine.runtime("describe()")
        world, transport = runtime.world, runtime.transport
        part = f" (job ranks {', '.join(map(str, world.job_ranks))})" if world.job_ranks else ""
        gathered = allgather_object((world.host or socket.gethostname(), self.nccl()))
        hosts = Counter(host for host, _ in gathered)
        where = ", ".join(f"{host}: {ranks}" for host, ranks in hosts.items())
        between = transport.between if len(hosts) > 1 else None
        speed = f", {between.describe()}" if between is not None else ""
        nccl = next((version for _, version in gathered if version is not None), None)
        gpus = f", NCCL {'.'.join(map(str, nccl))} for GPUs" if nccl else ""
        threads = self.count_threads()
        return (
            f"{world.size} rank{'s' * (world.size > 1)}{part} on {len(hosts)} host{'s' * (len(hosts) > 1)} "
            f"({where}), {transport.name} transport{speed}{gpus}, {self.label}, "
            f"{threads} thread{'s' * (threads > 1)} per rank"
        )

    def cuda_built(self) -> bool:
        """Was the framework built for CUDA? hvdkit then reduces its GPU tensors by NCCL where the ranks can use it.

        False for Keras on JAX, which reports its devices only.
        """
        return self.cuda

    def rocm_built(self) -> bool:
        """Was the framework built for ROCm? Like cuda_built(); in torch, ROCm tensors are called cuda tensors."""
        return self.rocm


def shutdown() -> None:
    """Disconnect this rank; every rank calls it. Optional at the end of a script, no effect before init().

    Raises RankLostError if another rank has died.
    """
    engine.shutdown()


def is_initialized() -> bool:
    """Has init() been called, and shutdown() not been called since?"""
    return engine.is_initialized()


def _world(call: str) -> World:
    return engine.runtime(call).world


def rank() -> int:
    """The number of this process among all ranks, from 0. Raises NotInitializedError before init()."""
    return _world("rank()").rank


def size() -> int:
    """The number of ranks. Raises NotInitializedError before init()."""
    return _world("size()").size


def local_rank() -> int:
    """The number of this process among the ranks of its host, from 0; selects the GPU.

    Raises NotInitializedError before init().
    """
    return _known(_world("local_rank()").local_rank)


def local_size() -> int:
    """The number of ranks on this host. Raises NotInitializedError before init()."""
    return _known(_world("local_size()").local_size)


def cross_rank() -> int:
    """The number of this host among the hosts that have a rank with this local_rank.

    Raises NotInitializedError before init().
    """
    return _known(_world("cross_rank()").cross_rank)


def cross_size() -> int:
    """The number of hosts that have a rank with this local_rank. Raises NotInitializedError before init()."""
    return _known(_world("cross_size()").cross_size)


def _known(value: int | None) -> int:
    assert value is not None, "init() completes the world"
    return value


def join_ranks() -> int:
    """Perform an adapter's join(). Returns the rank that joined last.

    Raises ConfigError with check_replicas, because the parameters of joined ranks differ, and ValueError where an
    optimizer's strategy needs every rank in its steps.
    """
    current = engine.runtime("join()")
    if current.config.check_replicas:
        raise ConfigError(
            f"join() lets ranks take different numbers of steps, but check_replicas={current.config.check_replicas} "
            "compares their parameters step by step. Set check_replicas=0, or do not call join()."
        )
    # This rank has no more work in any set. In each set it takes part in the others' work until all ranks have joined.
    engines = current.sets.engines()
    for reason in itertools.chain.from_iterable(each.joining.refusals.values() for each in engines):
        raise ValueError(f"hvd.join() was called on rank {current.world.rank}. {reason}")
    joins = [each.join() for each in engines]
    waiting = Backoff(engines[0].transport.check)
    while not all(join.done for join in joins):
        moved = [each.drive() for each in engines]
        if not any(moved):
            waiting.pause()
    for join in joins:
        if join.error is not None:
            raise join.error
    return joins[0].last_joined


def add_process_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    """Add a process set; every rank calls it, with the same ranks or with its own communicator. Returns the set.

    Raises ValueError for ranks that do not exist or occur twice, or if a set of these ranks exists; NotInitializedError
    before init(); HorovodInternalError if a rank has left.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    engine.runtime("add_process_set()").sets.add(added)
    return added


def split_world(color: int | None, key: int = 0) -> ProcessSet | None:
    """Make process sets of the ranks that pass the same color, as MPI_Comm_split does; every rank calls it.

    One collective call makes all of the sets. For a mesh of 2 columns, color=rank() // 2 makes the sets of the rows,
    and color=rank() % 2 those of the columns.
    key: the order of the ranks in a set; ranks with equal keys keep the order of the world.
    Returns the set of this rank, or None if its color is None. A set of the same ranks that exists already is returned.
    Raises NotInitializedError before init(), HorovodInternalError if a rank has left.
    """
    return engine.runtime("split_world()").sets.split(color, key)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank calls it. Returns False if the set was not added, or is the set of all ranks.

    For sets made from communicators each rank passes its own set, and all of them are removed.
    Raises NotInitializedError before init(), HorovodInternalError if a rank has left, TypeError for no ProcessSet.
    """
    check_process_set(process_set, "remove_process_set()")
    return engine.runtime("remove_process_set()").sets.remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every process set, by the number of the set; 0 is the set of all ranks.

    Raises NotInitializedError before init().
    """
    return engine.runtime("get_process_set_ids_and_ranks()").sets.ids_and_ranks()


#: The same under names that Horovod's own scripts and tests use.
get_process_sets = _get_process_set_ids_and_ranks = get_process_set_ids_and_ranks


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a Chrome trace of all named operations, on rank 0. View it in ui.perfetto.dev.

    mark_cycles: as in Horovod; has no effect on the native engine, which has no cycles.
    Raises OSError if the file cannot be written, ValueError if a timeline is already being written. Horovod's core
    writes its own timeline, and only if HOROVOD_TIMELINE=DYNAMIC was set before init(); otherwise it raises ValueError.
    """
    current = engine.runtime("start_timeline()")
    if not current.provider.start_timeline(file_path, mark_cycles) and current.world.rank == 0:
        current.timeline.start(file_path)


def stop_timeline() -> None:
    """Stop the trace that start_timeline() began, if any. Raises NotInitializedError before init()."""
    current = engine.runtime("stop_timeline()")
    current.provider.stop_timeline()
    current.timeline.stop()
