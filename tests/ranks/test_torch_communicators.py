"""Parts of the job as worlds: init() with a communicator or a list of ranks, and process sets of communicators.

The ranks outside of a part call nothing of hvdkit meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import quick_ones
from hvdrun_job import environment
from rank_job import find_mpirun
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, train, train_here

import hvdkit.torch as hvd
from hvdkit.config import Config
from hvdkit.engine import runtime as engine
from hvdkit.errors import ConfigError, HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.between.hierarchical import HierarchicalTransport
from hvdkit.transport.mpi.library import load_mpi
from hvdkit.transport.mpi.transport import MpiTransport
from hvdkit.transport.rank_subset import RankSubset, read_rank_subset
from hvdkit.transport.select import Connection, open_transport
from hvdkit.world import World

LARGE = 70_000  # float32, more than goes by the small way


class Seen(NamedTuple):
    """What a rank sees of its world, with its number in the job as the value that it gives."""

    rank: int
    size: int
    places: tuple[int, ...]
    summed: float
    gathered: list[int]
    broadcast: int
    exchanged: list[int]
    scattered: list[int]
    objects: list[int]


def look() -> Seen:
    """Call every collective."""
    job_rank = load_mpi().COMM_WORLD.rank
    one = torch.tensor([job_rank])
    large = hvd.allreduce(torch.full((LARGE,), float(job_rank)), op=hvd.Sum)
    assert bool((large == large[0]).all())
    return Seen(
        hvd.rank(),
        hvd.size(),
        (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        float(large[0]),
        hvd.allgather(one).tolist(),
        int(hvd.broadcast(one, root_rank=hvd.size() - 1)),
        hvd.alltoall(one.repeat(hvd.size())).tolist(),
        hvd.reducescatter(one.repeat(hvd.size()), op=hvd.Sum).tolist(),
        hvd.allgather_object(job_rank),
    )


def expected(members: list[int]) -> dict[int, Seen]:
    """By rank of the job, what the members of a part see, on one host."""
    size, total = len(members), sum(members)
    return {
        job_rank: Seen(rank, size, (rank, size, 0, 1), total, members, members[-1], members, [total], members)
        for rank, job_rank in enumerate(members)
    }


def in_two_worlds(transport: str) -> Seen:
    world = load_mpi().COMM_WORLD
    comm = world.Split(world.rank % 2, -world.rank)
    with joined(transport, comm=comm):
        seen = look()
    comm.Free()  # hvdkit has one of its own
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("transport", quick_ones(["auto", "mpi", "gloo", "hierarchical"], "auto"))
def test_two_worlds_of_communicators_work_side_by_side_in_their_own_order(transport: str) -> None:
    seen = run_ranks(4, in_two_worlds, transport)
    assert dict(enumerate(seen)) == expected([2, 0]) | expected([3, 1])


def on_simulated_hosts() -> Seen | None:
    def opener(config: Config, connection: Connection) -> tuple[World, Transport]:
        world, base = open_transport(config, connection)
        assert isinstance(base, MpiTransport)
        return world, HierarchicalTransport(base, nodes=[0, 0, 1], host="here", small_bytes=1)

    if load_mpi().COMM_WORLD.rank == 1:
        return None
    engine.init(opener=opener, subset=RankSubset((3, 0, 2)), transport="mpi")
    seen = look()
    hvd.shutdown()
    return seen


@pytest.mark.native("its own transports")
@pytest.mark.ranks
def test_a_part_spans_hosts_with_several_ranks() -> None:
    seen = run_ranks(4, on_simulated_hosts)
    assert dict(enumerate(seen)) == {1: None} | expected([3, 0, 2])


def in_one_part_after_another() -> list[Seen | None]:
    found: list[Seen | None] = []
    for members in ([2, 0], np.array([1, 2]), range(3), [1]):
        if load_mpi().COMM_WORLD.rank not in members:
            found.append(None)
            continue
        hvd.init(comm=members)
        hvd.init()  # of a library that knows nothing of the part
        found.append(look())
        hvd.shutdown()
    return found


@pytest.mark.ranks
def test_lists_of_ranks_are_parts_one_after_another_and_the_others_call_nothing() -> None:
    seen = run_ranks(3, in_one_part_after_another)
    parts = [expected(members) for members in ([2, 0], [1, 2], [0, 1, 2], [1])]
    assert seen == [[part.get(rank) for part in parts] for rank in range(3)]


def with_process_sets() -> dict[str, Any]:
    """In the world of the job's ranks 3, 2, 1: two sets of one communicator each, and one of a rank."""
    mpi = load_mpi()
    job = mpi.COMM_WORLD
    world = job.Split(job.rank == 0, -job.rank)
    if job.rank == 0:
        return {}
    halves = world.Split(world.rank == 1, world.rank)
    mine, single = hvd.ProcessSet(halves), hvd.ProcessSet([2])
    with joined(comm=world, process_sets=[single, mine]):
        assert hvd.global_process_set.mpi_comm is world and mine.mpi_comm is halves and single.mpi_comm is None
        waiting = hvd.allreduce_async(torch.tensor([float(job.rank)]), op=hvd.Sum, process_set=mine)
        beside = mine.mpi_comm.allreduce(job.rank)
        found = {
            "sets": hvd.get_process_set_ids_and_ranks(),
            "mine": (mine.process_set_id, mine.ranks, mine.rank() == halves.rank, mine.size() == halves.size),
            "sums": (beside, int(hvd.synchronize(waiting)), int(hvd.allreduce(torch.tensor(1), op=hvd.Sum))),
        }
        with pytest.raises(ValueError, match="has been added already"):
            hvd.add_process_set(hvd.ProcessSet(halves))
    with joined(comm=[world, halves]):
        found["of a list"] = hvd.get_process_set_ids_and_ranks()
    with joined(comm=world):
        backwards = world.Split(0, -world.rank)
        with pytest.raises(
            ValueError, match=r"holds the ranks \[1, 2, 3\] of the job.* world holds the ranks \[3, 2, 1\]"
        ):
            hvd.add_process_set(hvd.ProcessSet(backwards))
        added = hvd.add_process_set(halves)  # as it may be a list of ranks
        found["added"] = (added.ranks, int(hvd.allreduce(torch.tensor(1), op=hvd.Sum, process_set=added)))
        hvd.barrier()  # Horovod ends what others are still at when a rank shuts down
        assert hvd.remove_process_set(added)
        found["left"] = hvd.get_process_set_ids_and_ranks()
        hvd.barrier()
    return found


@pytest.mark.ranks
def test_communicators_are_process_sets_of_a_part_and_serve_mpi4py_beside() -> None:
    seen = run_ranks(4, with_process_sets)
    assert seen[0] == {}
    for job_rank, (number, ranks, total) in {3: (1, [0, 2], 4), 2: (2, [1], 2), 1: (1, [0, 2], 4)}.items():
        assert seen[job_rank] == {
            "sets": {0: [0, 1, 2], 1: [0, 2], 2: [1], 3: [2]},
            "mine": (number, ranks, True, True),
            "sums": (total, total, 3),
            "of a list": {0: [0, 1, 2], 1: [0, 2], 2: [1]},
            "added": (ranks, len(ranks)),
            "left": {0: [0, 1, 2]},
        }


def with_a_stranger() -> str:
    job = load_mpi().COMM_WORLD
    pair = job.Split(job.rank == 2, job.rank)
    if job.rank == 0:
        with joined(comm=[0]), pytest.raises(ValueError) as caught:
            hvd.add_process_set(hvd.ProcessSet(pair))
        return str(caught.value)
    return ""


@pytest.mark.ranks
def test_a_process_set_of_others_than_the_world_is_refused() -> None:
    said = run_ranks(3, with_a_stranger)[0]
    assert "communicator of rank 0 holds the ranks [0, 1] of the job" in said and "world holds the ranks [0]" in said


def train_in_a_part(case: Case) -> Weights | None:
    if load_mpi().COMM_WORLD.rank == 1:
        return None
    with joined(comm=[2, 0]):
        model, plain = case.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        return train(case, model, optimizer, rank=hvd.rank(), of=hvd.size(), size=hvd.size())


@pytest.mark.ranks
def test_a_part_trains_as_one_process_with_the_whole_batch() -> None:
    case = Case(steps=4)
    results = run_ranks(3, train_in_a_part, case)
    assert results[1] is None
    assert_alike([results[2], results[0]], train_here(case, 2), 1e-12)


def refused() -> dict[str, str]:
    """What init() says of each thing that cannot be a world; none of it is collective."""
    mpi = load_mpi()
    job = mpi.COMM_WORLD
    side = job.Split(job.rank == 0, job.rank)
    between = side.Create_intercomm(0, job, int(job.rank == 0))
    freed = job.Dup()
    freed.Free()
    others = [rank for rank in range(3) if rank != job.rank]
    tried: dict[str, tuple[Any, dict[str, Any]]] = {
        "null": (mpi.COMM_NULL, {}),
        "freed": (freed, {}),
        "between": (between, {}),
        "twice": ([0, 1, 1], {}),
        "missing": ([job.rank, 7], {}),
        "outside": (others, {}),
        "negative": ([-1, 0], {}),
        "empty": ([], {}),
        "word": ("all", {}),
        "number": (3, {}),
        "mixed": ([job, 3], {}),
    }
    found = {}
    for name, (comm, settings) in tried.items():
        with pytest.raises(ConfigError) as caught:
            hvd.init(comm=comm, **settings)
        assert not hvd.is_initialized()
        found[name] = str(caught.value)
    for name, comm in {"set of null": mpi.COMM_NULL, "set between": between, "set of number": 3}.items():
        with pytest.raises(ValueError) as caught_of_set:
            hvd.ProcessSet(comm)
        found[name] = str(caught_of_set.value)
    with joined(comm=[job.rank]), pytest.raises(ConfigError) as caught:
        hvd.init(comm=[1, 0, 2])
    found["again"] = str(caught.value)
    return found


@pytest.mark.ranks
def test_what_cannot_be_a_world_is_refused_with_what_was_seen() -> None:
    expected_words = {
        "null": "comm is MPI.COMM_NULL",
        "freed": "the communicator was freed",
        "between": "intercommunicator (2 local and 1 remote processes)",
        "twice": "comm=[0, 1, 1] contains the ranks [1] more than once",
        "missing": "comm=[1, 7]: ranks [7] do not exist, because MPI_COMM_WORLD has 3 processes",
        "outside": "comm=[0, 2]) was called by rank 1 of the job",
        "negative": "comm=[-1, 0] is neither",
        "empty": "comm=[] is neither",
        "word": "comm='all' is neither",
        "number": "comm=3 is neither",
        "mixed": "mixes mpi4py communicators with other objects",
        "set of null": "ProcessSet(comm) is MPI.COMM_NULL",
        "set between": "ProcessSet(comm) is an intercommunicator",
        "set of number": "ProcessSet(3): pass a list of ranks",
        "again": "with the ranks [1, 0, 2] of the job, but hvdkit is already initialized with the ranks [1]",
    }
    said = run_ranks(3, refused)[1]
    assert said.keys() == expected_words.keys()
    for name, words in expected_words.items():
        assert words in said[name], name


def refused_by_setting() -> list[str]:
    said = []
    settings: dict[str, Any]
    for settings in ({"elastic": True}, {"transport": "single"}):
        with pytest.raises(ConfigError) as caught:
            hvd.init(comm=[load_mpi().COMM_WORLD.rank], **settings)
        said.append(str(caught.value))
    return said


@pytest.mark.native("its own settings")
@pytest.mark.ranks
def test_elastic_and_a_transport_without_mpi_are_refused_in_a_part() -> None:
    elastic, single = run_ranks(3, refused_by_setting)[1]
    assert "init(comm=...) selects the ranks [1] of the job, but elastic training needs the whole job" in elastic
    assert "HVDKIT_TRANSPORT=single is for one process without MPI, but comm selects the ranks [1]" in single


@pytest.mark.native("reads variables")
def test_a_part_needs_a_launcher_with_mpi() -> None:
    world = World(1, 4, 1, 4, 0, 1, "here", "torchrun")
    assert read_rank_subset(range(4), world) is None
    with pytest.raises(ConfigError, match=r"comm=\[1, 0\].*torchrun started these 4 ranks without MPI"):
        read_rank_subset([1, 0], world)
    alone = World(0, 1, 0, 1, 0, 1, "here", "none")
    assert read_rank_subset(None, alone) is None and read_rank_subset([0], alone) is None


def stall() -> str:
    job_rank = load_mpi().COMM_WORLD.rank
    if job_rank == 0:
        return ""
    hvd.init(comm=[2, 1], stall_check_s=0.0, stall_shutdown_s=0.5)
    said = ""
    if hvd.rank() == 0:
        with pytest.raises(HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="lonely")
        said = str(caught.value)
    load_mpi().COMM_WORLD.Create_group(load_mpi().COMM_WORLD.Get_group().Incl([1, 2])).barrier()
    engine.shutdown(idle=False)
    return said


@pytest.mark.slow
@pytest.mark.native("Horovod tells of its own stalls")
@pytest.mark.ranks
def test_a_stall_is_told_with_the_ranks_of_the_part_and_of_the_job() -> None:
    said = run_ranks(3, stall, fresh=True)[2]
    assert "submitted by rank 0 (job rank 2, host " in said and "and not by rank 1 (job rank 1, host " in said


FAILS = """
from mpi4py import MPI
import time
import hvdkit.torch as hvd
job = MPI.COMM_WORLD
hvd.init(comm=job.Split(job.rank == 2, job.rank))
if job.rank == 2:
    raise ValueError("the second part is wrong")
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_failure_in_one_part_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    for launcher in (find_mpirun(), (sys.executable, "-m", "hvdkit.launch")):
        argv = [*launcher, "-np", "3", sys.executable, str(script)]
        done = subprocess.run(argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=100)
        assert done.returncode
        assert b"hvdkit: rank 0 (job rank 2) on " in done.stderr and b"the second part is wrong" in done.stderr
