"""What is Gloo's own: who it notices, whom it waits for, where its ranks are, and what happens where it is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numbers_of_ranks import buffer_of, expect, pattern, reduced
from openers import OPENERS
from pipe_ranks import PipeTransport, run_piped
from ranks import run_ranks

from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.transport.api import Transport
from hvdkit.transport.between.hierarchical import HierarchicalTransport
from hvdkit.transport.buckets import Buckets, BucketSpec
from hvdkit.transport.buffer import Buffer, as_buffer
from hvdkit.transport.gloo.rendezvous import TransportRendezvousStore
from hvdkit.transport.gloo.transport import GlooTransport, open_gloo
from hvdkit.transport.polling import Backoff
from hvdkit.transport.select import choose_backend, choose_transport
from hvdkit.transport.shared.transport import SharedMemoryTransport
from hvdkit.transport.single import SingleTransport
from hvdkit.world import World


def open_over(group: PipeTransport) -> GlooTransport:
    return open_gloo(TransportRendezvousStore(group), group.rank, group.size, host="here")


def small_allreduce(transport: Transport) -> None:
    transport.allreduce(as_buffer(np.zeros(3, np.float32)))


def large_allreduce(transport: Transport) -> None:
    transport.allreduce(as_buffer(np.zeros(3_000_000, np.float32)))


def half_allreduce(transport: Transport) -> None:
    transport.allreduce(as_buffer(np.zeros(100_000, np.float16)))


def allgather(transport: Transport) -> None:
    transport.allgather(as_buffer(np.zeros(transport.rank, np.int64)), list(range(transport.size)))


def barrier(transport: Transport) -> None:
    transport.barrier()


def buckets(transport: Transport) -> None:
    made = transport.open_buckets([BucketSpec("float32", 100_000), BucketSpec("float16", 1000)])
    for index in range(2):
        made.memory[index].array[:] = 0
        made.start(index)
    for index in range(2):
        made.wait(index)


_plans: dict[Transport, Buckets] = {}


def _run_phase(transport: Transport, phase: str) -> None:
    """With buckets that the first call has opened, so that the second one is lost in the phase itself."""
    if transport not in _plans:
        _plans[transport] = transport.open_buckets([BucketSpec("float32", 100_000)])
    plan = _plans[transport]
    plan.memory[0].array[:] = 0
    getattr(plan, phase)(0)
    plan.wait(0)


def reduce_scatter(transport: Transport) -> None:
    _run_phase(transport, "reduce_scatter")


def all_gather(transport: Transport) -> None:
    _run_phase(transport, "all_gather")


def message(transport: Transport) -> None:
    mail = transport.open_mailbox()
    peers = [0] if mail.star and transport.rank else range(transport.size)
    for rank in peers:
        mail.send(rank, b"here")
    seen: set[int] = set()
    waiting = Backoff(transport.check)
    while len(seen) < len(peers):
        seen |= {rank for rank, _ in mail.receive()}
        waiting.pause()


def small_and_large_messages(transport: Transport) -> None:
    for count in (1, 1_000_000):
        peers = [peer for peer in range(transport.size) if peer != transport.rank]
        requests = [transport.isend(as_buffer(np.zeros(count, np.float32)), peer) for peer in peers]
        for peer in peers:
            transport.receive(as_buffer(np.ones(count, np.float32)), peer)
        for request in requests:
            request.wait()


def large_messages_to_rank_one(transport: Transport) -> None:
    buffer = as_buffer(np.zeros(2_000_000, np.float32))
    if transport.rank == 1:
        for peer in (0, 2):
            transport.receive(buffer, peer)
    else:
        transport.send(buffer, 1)


Call = Callable[[Transport], None]
CALLS: list[Call] = [small_allreduce, large_allreduce, half_allreduce, allgather, barrier, buckets, message]
CALLS += [reduce_scatter, all_gather, small_and_large_messages, large_messages_to_rank_one]


#: The quick tier has buckets, which go over both, and a message.
QUICK = (buckets, message)
LOSSES = [
    pytest.param(
        call,
        shared,
        id=f"{call.__name__}-{'shared_memory' if shared else 'gloo'}",
        marks=[] if call in QUICK and (call, shared) != (message, True) else [pytest.mark.slow],
    )
    for call in CALLS
    for shared in (False, True)
]


def lose_rank_one(group: PipeTransport, call: Call, shared: bool, folder: Path) -> str:
    """The error of a rank that waits for rank 1; it stays until the other one has its error too."""
    base = open_over(group)
    transport: Transport = SharedMemoryTransport(base, base, host="here") if shared else base
    call(transport)
    transport.barrier()
    if group.rank == 1:
        time.sleep(0.3)  # the others are waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    message = ""
    try:
        call(transport)
        transport.barrier()
    except RankLostError as error:
        message = str(error)
    stay(group, folder)
    return message


def stay(group: PipeTransport, folder: Path) -> None:
    """Wait until all ranks but one have their errors: whoever ends before is a lost rank too."""
    (folder / str(group.rank)).touch()
    while len(list(folder.iterdir())) < group.size - 1:
        time.sleep(0.01)


@pytest.mark.ranks
@pytest.mark.parametrize(("call", "shared"), LOSSES)
def test_a_killed_rank_is_noticed_and_named_by_all_others(call: Call, shared: bool, tmp_path: Path) -> None:
    answers = run_piped(3, lose_rank_one, call, shared, tmp_path)
    assert answers[1] is None
    for rank in (0, 2):
        assert "Rank 1 on host here has died: it raised an error, was killed, crashed" in answers[rank]


def lose_rank_one_of_two_hosts(group: PipeTransport, folder: Path) -> str:
    """The error of a rank, each of which finds out by itself: those that know already stay."""
    nodes = [rank % 2 for rank in range(group.size)]
    transport = HierarchicalTransport(open_over(group), nodes=nodes, host="here", small_bytes=1)
    reduce_scatter(transport)
    transport.barrier()
    if group.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    try:
        reduce_scatter(transport)
    except RankLostError as lost:
        error = str(lost)
    stay(group, folder)
    return error


@pytest.mark.ranks
def test_a_rank_that_is_killed_on_another_host_is_noticed_by_all(tmp_path: Path) -> None:
    answers = run_piped(4, lose_rank_one_of_two_hosts, tmp_path)
    for rank in (0, 2, 3):
        assert "Rank 1 on host here has died: it raised an error, was killed, crashed" in answers[rank]


def leave_early(group: PipeTransport) -> str:
    transport = open_over(group)
    transport.barrier()
    said = ""
    if group.rank == 1:
        transport.leave()
    else:
        try:
            small_allreduce(transport)
        except RankLostError as error:
            said = str(error)
    group.barrier()  # rank 1's process is there until the others have noticed
    return said


@pytest.mark.ranks
def test_a_rank_that_has_left_is_told_from_a_dead_one() -> None:
    for rank, said in enumerate(run_piped(3, leave_early)):
        left = f"Rank 1 on host here has shut hvdkit down (or reached the end of its script) while rank {rank}"
        assert said == "" if rank == 1 else left in said


def end_after_a_loss(group: PipeTransport) -> bool:
    """Close a transport while a collective is under way that nobody will finish."""
    transport = open_over(group)
    transport.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError):
        small_allreduce(transport)
    transport.close()
    transport.close()
    return True


@pytest.mark.ranks
def test_what_is_left_of_a_broken_world_can_be_closed() -> None:
    assert run_piped(3, end_after_a_loss) == [True, None, True]


def wait_for_a_slow_rank(transport: Transport) -> None:
    if transport.rank == 0:
        time.sleep(3.0)  # longer than the time that a dead rank is heard to the end
    for call in CALLS:
        call(transport)


@pytest.mark.ranks
def test_a_slow_rank_is_waited_for() -> None:
    run_ranks(3, wait_for_a_slow_rank, transport="gloo")


def open_and_close_again_and_again(transport: Transport) -> None:
    for turn in range(4):
        other = OPENERS["gloo"]()
        buffer = buffer_of(pattern(other.rank, 1000), "float32")
        other.allreduce(buffer)
        expect(buffer, reduced(other.size, 1000))
        if turn == transport.rank:
            time.sleep(0.1)
        other.close()
        other.close()


@pytest.mark.ranks
def test_a_world_can_be_left_and_joined_again() -> None:
    run_ranks(3, open_and_close_again_and_again, transport="gloo")


def close_at_once(transport: Transport) -> None:
    for _ in range(10):
        transport.open_buckets([BucketSpec("float32", 1000)]).close()


@pytest.mark.ranks
def test_a_rank_that_closes_at_once_leaves_the_others_their_connections() -> None:
    run_ranks(4, close_at_once, transport="gloo")


def find_nodes(transport: GlooTransport) -> list[int]:
    return transport.find_nodes()


@pytest.mark.ranks
def test_ranks_of_one_boot_are_on_one_host() -> None:
    assert run_ranks(3, find_nodes, transport="gloo") == [[0] * 3] * 3


def overlapping_groups(transport: GlooTransport) -> None:
    size = transport.size
    members = [[0, 1], list(range(size)), list(range(size))[::-1]]
    groups = [transport.split([ranks]) for ranks in members]
    for turn, (group, ranks) in enumerate(zip(groups, members, strict=True)):
        if group is not None:
            mail = group.open_mailbox()
            mail.send((group.rank + 1) % group.size, b"%d" % turn)
            came: list[tuple[int, bytes]] = []
            while not came:
                came = mail.receive()
            assert came == [((group.rank - 1) % group.size, b"%d" % turn)]
            mail.close()
            assert isinstance(group, GlooTransport) and group.ranks == tuple(ranks)
    for group in groups:
        if group is not None:
            group.close()


@pytest.mark.ranks
def test_mailboxes_of_groups_with_common_ranks_do_not_mix() -> None:
    run_ranks(3, overlapping_groups, transport="gloo")


def beside_torchs_own_group(transport: GlooTransport) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=transport._rendezvous.store, rank=transport.rank, world_size=transport.size)
    try:
        tensor, buffer = torch.ones(1000), buffer_of(np.ones(1000), "float32")
        for _ in range(20):
            work = dist.all_reduce(tensor, async_op=True)
            transport.allreduce(buffer)
            work.wait()
            tensor /= transport.size
            buffer.array[:] /= transport.size
        expect(buffer, tensor.numpy())
    finally:
        dist.destroy_process_group()
    transport.barrier()


@pytest.mark.ranks
def test_the_scripts_own_group_goes_on_beside_it() -> None:
    run_ranks(2, beside_torchs_own_group, transport="gloo", fresh=True)


def test_one_rank_needs_nobody() -> None:
    transport = open_gloo(TransportRendezvousStore(SingleTransport()), 0, 1, host="here")
    buffer = Buffer(np.arange(5, dtype=np.float32), "float32")
    transport.allreduce(buffer, scale=0.5)
    expect(buffer, np.arange(5) / 2)
    transport.close()


class GoneStore:
    """A rendezvous store whose process has been killed."""

    private = False

    def put(self, key: str, value: bytes) -> None:
        raise AssertionError

    def get(self, key: str) -> bytes | None:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_has_gone_is_an_error_after_which_an_elastic_rank_goes_on() -> None:
    with pytest.raises(HorovodInternalError, match=r"Rank 1 cannot find the other ranks.*Connection reset by peer"):
        open_gloo(GoneStore(), 1, 2, host="here")


def world(launcher: str, size: int) -> World:
    return World(0, size, 0, size, 0, 1, "here", launcher)


@pytest.mark.parametrize(
    "wish, launcher, size, backend",
    [
        ("auto", "torchrun", 2, "gloo"),
        ("auto", "horovodrun", 2, "gloo"),
        ("auto", "torchrun", 1, "none"),
        ("shared_memory", "torchrun", 2, "gloo"),
        ("hierarchical", "horovodrun", 4, "gloo"),
        ("mpi", "torchrun", 2, "mpi"),
        ("gloo", "openmpi", 2, "gloo"),
        ("auto", "openmpi", 2, "mpi"),
        ("hierarchical", "slurm", 4, "mpi"),
        ("auto", "none", 1, "none"),
        ("mpi", "none", 1, "mpi"),
        ("gloo", "none", 1, "gloo"),
        ("single", "none", 1, "none"),
    ],
)
def test_what_carries_bytes_follows_from_the_wish_and_the_launcher(
    wish: str, launcher: str, size: int, backend: str
) -> None:
    assert choose_backend(wish, world(launcher, size), mpi_running=False) == backend


def test_a_program_that_runs_mpi_itself_has_its_ranks() -> None:
    assert choose_backend("auto", world("none", 1), mpi_running=True) == "mpi"


def test_ranks_of_one_host_share_memory_over_gloo_too() -> None:
    assert choose_transport("auto", [2, 2], "gloo") == "shared_memory"
    assert choose_transport("auto", [2, 2, 1], "gloo") == "hierarchical"
    assert choose_transport("auto", [1, 1], "gloo") == "gloo"
    assert choose_transport("gloo", [2, 2], "gloo") == "gloo"


def test_without_torch_torchrun_and_horovodrun_have_a_cure() -> None:
    program = "import sys; sys.modules['torch'] = None\nimport hvdkit.engine.runtime as r; r.init()"
    env = {**os.environ, "HVDKIT_ENGINE": "native", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "MissingDependencyError: horovodrun started the ranks without MPI, so they communicate over" in done.stderr
    told = "'torch' is not installed. Run: pip install 'hvdkit[torch]', in a clone '.[torch]'. Or start the script with"
    assert told in done.stderr
