"""Ranks, sizes, process sets, join() and the timeline, as every adapter offers them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import ConfigError
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.part import is_communicator, read_part
from hvdkit.transport.polling import Backoff
from hvdkit.world import World, read_world


@dataclass(frozen=True)
class Framework:
    """What an adapter says of its framework, and the adapter's calls that follow from it.

    name: whose Horovod's core is to be loaded, "" for none in particular. label: for describe(), with its version.
    arithmetic: makes what adds and casts 16-bit numbers fastest, None for numpy. count_threads: that compute in a rank.
    cuda, rocm: what the framework was built for.
    """

    name: str
    label: str
    arithmetic: Callable[[], Arithmetic | None]
    count_threads: Callable[[], int]
    cuda: bool
    rocm: bool

    def init(
        self,
        comm: Sequence[Any] | Any | None = None,
        process_sets: Sequence[ProcessSet | Sequence[int] | Any] | str | None = None,
        **settings: Any,
    ) -> None:
        """Join the world that the launcher made. Every rank calls it, before any other call of hvdkit.

        comm: the processes that make the world, by default all of the job: a communicator of mpi4py's, or a list of
        ranks in MPI_COMM_WORLD, whose order is that of the ranks here. Only these processes call init(); the others
        start MPI. A list of communicators is the world and, after it, process sets.
        process_sets: sets, lists of ranks or communicators, to be known from the beginning, each once;
        "dynamic", which Horovod wants for later ones, is not needed.
        settings: fields of hvdkit.Config, e.g. transport="mpi"; they beat the environment.
        Raises WorldError if launcher and MPI disagree about the number of ranks, ConfigError for a bad setting or
        a comm that cannot be a world, ValueError for process sets that cannot be made.
        """
        sets = () if process_sets is None or isinstance(process_sets, str) else tuple(process_sets)
        if isinstance(comm, Sequence) and any(is_communicator(ranks) for ranks in comm):
            if not all(is_communicator(ranks) for ranks in comm):
                raise ConfigError(
                    f"comm={comm!r} has communicators of mpi4py's in it, and other things. Pass one communicator, a "
                    f"list of ranks, or a list of communicators: the world, and after it process sets."
                )
            comm, sets = comm[0], (*comm[1:], *sets)
        part = read_part(comm, read_world())
        known = [ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks) for ranks in sets]
        first = not engine.is_initialized()
        engine.init(known, arithmetic=self.arithmetic(), framework=self.name, part=part, **settings)
        if first:
            global_process_set.mpi_comm = comm if is_communicator(comm) else None

    def describe(self) -> str:
        """Say in a line what runs where: ranks, hosts, transport and threads; collective, the same on every rank.

        Example: "4 ranks on 2 hosts (node1: 2, node2: 2), hierarchical transport, torch 2.13.0, 1 thread a rank".
        Raises NotInitializedError before init().
        """
        runtime = engine.runtime("describe()")
        world, transport = runtime.world, runtime.transport
        part = f" (of the job's ranks {', '.join(map(str, world.job_ranks))})" if world.job_ranks else ""
        hosts = Counter(allgather_object(world.host or socket.gethostname()))
        where = ", ".join(f"{host}: {ranks}" for host, ranks in hosts.items())
        between = transport.between if len(hosts) > 1 else None
        speed = f", {between.describe()}" if between is not None else ""
        threads = self.count_threads()
        return (
            f"{world.size} rank{'s' * (world.size > 1)}{part} on {len(hosts)} host{'s' * (len(hosts) > 1)} ({where}), "
            f"{transport.name} transport{speed}, {self.label}, {threads} thread{'s' * (threads > 1)} a rank"
        )

    def cuda_built(self) -> bool:
        """Was the framework built for CUDA? Then hvdkit reduces its GPU tensors, through the host's memory for now.

        False for Keras on JAX, which tells its devices only.
        """
        return self.cuda

    def rocm_built(self) -> bool:
        """Was the framework built for ROCm? As cuda_built(); to torch its GPU tensors are cuda tensors."""
        return self.rocm


def shutdown() -> None:
    """Leave the world; every rank calls it. Optional at the end of a script, and harmless before init().

    Raises RankLostError if another rank has died.
    """
    engine.shutdown()


def is_initialized() -> bool:
    """Has init() been called, and shutdown() not since?"""
    return engine.is_initialized()


def _world(call: str) -> World:
    return engine.runtime(call).world


def rank() -> int:
    """This process's number among all ranks, from 0. Raises NotInitializedError before init()."""
    return _world("rank()").rank


def size() -> int:
    """How many ranks there are. Raises NotInitializedError before init()."""
    return _world("size()").size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0; picks the GPU. NotInitializedError before init()."""
    return _known(_world("local_rank()").local_rank)


def local_size() -> int:
    """How many ranks this host has. Raises NotInitializedError before init()."""
    return _known(_world("local_size()").local_size)


def cross_rank() -> int:
    """The number of this host among those that have a rank of this local_rank. NotInitializedError before init()."""
    return _known(_world("cross_rank()").cross_rank)


def cross_size() -> int:
    """How many hosts have a rank of this local_rank. Raises NotInitializedError before init()."""
    return _known(_world("cross_size()").cross_size)


def _known(value: int | None) -> int:
    assert value is not None, "init() completes the world"
    return value


def join_ranks() -> int:
    """What join() does; see the adapters'. Returns the rank that joined last.

    Raises ConfigError where replicas are checked: they differ here."""
    current = engine.runtime("join()")
    if current.config.check_replicas:
        raise ConfigError(
            "join() is for ranks that take different numbers of steps, and "
            f"check_replicas={current.config.check_replicas} compares them step by step. Leave one of the two out."
        )
    # This rank has no more work in any of the sets, and takes part in the others' until all of their ranks have joined.
    engines = current.sets.engines()
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
    """Make a process set known; every rank calls it, with the same ranks, or its communicator. Returns the set.

    Raises ValueError for ranks that are not there or come twice, or if a set of these ranks is known,
    NotInitializedError before init(), HorovodInternalError if a rank has left.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    engine.runtime("add_process_set()").sets.add(added)
    return added


def split_world(color: int | None, key: int = 0) -> ProcessSet | None:
    """Make a process set of the ranks that give the same color, as MPI_Comm_split does; every rank calls it.

    One collective call, however many sets: color=rank() // 2 makes those of a mesh's inner axis of 2, color=rank() % 2
    those of the outer one. key: the order in a set, ranks of one key in their own. Returns this rank's set, None for a
    color of None. A set of the same ranks that is known is taken as it is.
    Raises NotInitializedError before init(), HorovodInternalError if a rank has left.
    """
    return engine.runtime("split_world()").sets.split(color, key)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; every rank calls it. False if it was not known, or is the set of all ranks.

    Of sets of communicators each rank passes its own, and all of them are forgotten.

    Raises NotInitializedError before init(), HorovodInternalError if a rank has left.
    """
    return engine.runtime("remove_process_set()").sets.remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every process set, by its number; 0 is the set of all ranks. NotInitializedError before init()."""
    return engine.runtime("get_process_set_ids_and_ranks()").sets.ids_and_ranks()


#: The same under names that Horovod's own scripts and tests use.
get_process_sets = _get_process_set_ids_and_ranks = get_process_set_ids_and_ranks


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a Chrome trace of all named operations, on rank 0; chrome://tracing or ui.perfetto.dev show it.

    mark_cycles: as in Horovod; hvdkit's own engine has no cycles to mark. Raises OSError if the file cannot be written,
    ValueError if a timeline is being written. Where Horovod's core is the engine it writes its own, and has to be told
    of that before init(): ValueError without HOROVOD_TIMELINE=DYNAMIC.
    """
    current = engine.runtime("start_timeline()")
    if current.horovod is not None:
        current.horovod.basics.start_timeline(file_path, mark_cycles)
    elif current.world.rank == 0:
        current.timeline.start(file_path)


def stop_timeline() -> None:
    """End the trace that start_timeline() began, if one is on. NotInitializedError before init()."""
    current = engine.runtime("stop_timeline()")
    if current.horovod is not None:
        current.horovod.basics.stop_timeline()
    current.timeline.stop()
