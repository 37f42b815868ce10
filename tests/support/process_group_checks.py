"""Bodies for ranks that use hvdkit as a backend of torch.distributed, beside Gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.errors import RankLostError, WorldError

warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its functions
Tensor = torch.Tensor
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int32, torch.int64)
#: Elements: none, one, few, more than a slot, more than one piece of shared memory.
COUNTS = (0, 1, 7, 40_000, 700_001)


@contextmanager
def process_groups(*, shut_down: bool = True) -> Iterator[tuple[Any, Any]]:
    """hvdkit's group of all ranks and Gloo's; ends both. shut_down: hvdkit too."""
    torch.set_num_threads(1)
    dist.init_process_group("hvdkit")
    try:
        yield dist.group.WORLD, dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()
        if shut_down:
            hvd.shutdown()


def numbers(count: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Other ones on each rank; of integers small enough for a product of them."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(1, 5, (count,), generator=generator).to(dtype)


def same(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Check equal numbers, to a share of the largest one."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    scale = max(1.0, float(wanted.double().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=tolerance * scale)


def tolerance_of(dtype: torch.dtype) -> float:
    """Of two libraries' results that both round."""
    return {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-7 if dtype == torch.float32 else 1e-12) * 2


def check_reductions() -> None:
    """All reductions of all dtypes are Gloo's; AVG is the mean."""
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    bits = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
    with process_groups() as (ours, gloo):
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in (*FLOATS, *INTEGERS):
            for count in COUNTS:
                mine = numbers(count, dtype, rank)
                for op in [*ops, *([] if dtype.is_floating_point else bits)]:
                    wanted, found = mine.clone(), mine.clone()
                    dist.all_reduce(wanted, op, group=gloo)
                    dist.all_reduce(found, op, group=ours)
                    same(found, wanted, tolerance_of(dtype))
                    on_root = mine.clone()
                    dist.reduce(on_root, size - 1, op, group=ours)
                    same(on_root, wanted if rank == size - 1 else mine, tolerance_of(dtype))
                    whole = torch.cat([mine] * size)
                    part = torch.empty(count, dtype=dtype)
                    dist.reduce_scatter_tensor(part, whole, op, group=ours)
                    same(part, wanted, tolerance_of(dtype))
            if dtype.is_floating_point:
                mean = numbers(9, dtype, rank)
                everyone = torch.stack([numbers(9, dtype, each).double() for each in range(size)])
                dist.all_reduce(mean, dist.ReduceOp.AVG)
                same(mean, everyone.mean(0).to(dtype), tolerance_of(dtype))


def check_copies() -> None:
    """Everything that only moves numbers is as Gloo has it, for tensors that are contiguous and that are not."""
    with process_groups() as (ours, gloo):
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            for count in COUNTS:
                mine = numbers(count, dtype, rank)
                _compare(_copies(ours, mine, rank, size), _copies(gloo, mine, rank, size))
        sizes = [(7 * each) % 5 + each for each in range(size)]  # uneven, some zero
        gathered = [torch.empty(count) for count in sizes]
        dist.all_gather(gathered, numbers(sizes[rank], torch.float32, rank))
        for each, count in enumerate(sizes):
            same(gathered[each], numbers(count, torch.float32, each), 0)
        matrix = torch.arange(12.0).reshape(3, 4).t() * (rank + 1)  # not contiguous
        dist.all_reduce(matrix)
        same(matrix, torch.arange(12.0).reshape(3, 4).t() * (size * (size + 1) / 2), 0)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": each} for each in range(size)]
        said = [f"from {rank}"]
        dist.broadcast_object_list(said, src=size - 1)
        assert said == [f"from {size - 1}"]


def _copies(group: Any, mine: Tensor, rank: int, size: int) -> list[Tensor]:
    count, root = mine.numel(), size - 1
    empty = [torch.empty_like(mine) for _ in range(size)]
    sent = mine.clone()
    dist.broadcast(sent, root, group=group)
    dist.all_gather(empty, mine, group=group)
    into = mine.new_empty(size * count)
    dist.all_gather_into_tensor(into, mine, group=group)
    gathered = [torch.zeros_like(mine) for _ in range(size)]
    dist.gather(mine, gathered if rank == root else None, root, group=group)
    one = torch.empty_like(mine)
    dist.scatter(one, [mine.roll(each) for each in range(size)] if rank == root else None, root, group=group)
    rows = torch.cat([mine.roll(each) for each in range(size)])
    turned = torch.empty_like(rows)
    dist.all_to_all_single(turned, rows, group=group)
    lengths = [[(2 * sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    to_others, from_others = lengths[rank], [each[rank] for each in lengths]
    uneven = mine.new_empty(sum(from_others), count)
    source = mine.repeat(sum(to_others), 1)
    dist.all_to_all_single(uneven, source, from_others, to_others, group=group)
    return [sent, *empty, into, *gathered, one, turned, uneven]


def _compare(ours: list[Tensor], gloo: list[Tensor]) -> None:
    for found, wanted in zip(ours, gloo, strict=True):
        assert torch.equal(found, wanted)


def _isend(tensor: Tensor, peer: int, tag: int = 0) -> Any:
    return dist.isend(tensor, peer, tag=tag)


def _irecv(tensor: Tensor, peer: int) -> Any:
    return dist.irecv(tensor, peer)


def check_messages() -> None:
    """Messages come by tag, in any order; batches of them, and such that are not waited for at once."""
    with process_groups():
        rank, size = dist.get_rank(), dist.get_world_size()
        after, before = (rank + 1) % size, (rank - 1) % size
        sends = [_isend(torch.full((count,), float(tag)), after, tag=tag) for tag, count in ((1, 3), (2, 500_000))]
        large, small = torch.empty(500_000), torch.empty(3)
        dist.recv(large, before, tag=2)
        assert dist.recv(small, before, tag=1) == before
        assert (large == 2).all() and (small == 1).all()
        for each in sends:
            each.wait()
            assert each.is_completed()
        rows = torch.arange(600_000.0).reshape(2, -1).t()  # not contiguous
        got = torch.empty(300_000, 2).t().contiguous().t()
        batch = [dist.P2POp(dist.isend, rows, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert torch.equal(got, rows)
        # A message under way while the ranks do collectives of both kinds.
        sent = _isend(torch.ones(2_000_000), after)
        arriving = torch.zeros(2_000_000)
        receiving = _irecv(arriving, before)
        summed = torch.ones(100_000)
        work = dist.all_reduce(summed, async_op=True)
        work.wait()
        receiving.wait()
        sent.wait()
        assert (arriving == 1).all() and (summed == size).all()


def check_asynchronous() -> None:
    """Asynchronous works end in their order, with futures; synchronous ones come after them; groups run at once."""
    with process_groups():
        rank, size = dist.get_rank(), dist.get_world_size()
        first, second = torch.ones(300_000), torch.ones(5)
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(first, async_op=True)]
        dist.all_reduce(second)
        assert all(work.is_completed() for work in works) and (first == size**2).all()
        future = dist.all_reduce(second, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert (doubled.wait() == 2 * size**2).all()
        came = time.monotonic()
        dist.barrier()
        passed = torch.tensor([-came, time.monotonic()], dtype=torch.float64)
        dist.all_reduce(passed, op=dist.ReduceOp.MIN)
        assert -passed[0] <= passed[1], "a rank has passed before another one came"
        other = dist.new_group()
        mine, theirs = torch.ones(200_000), torch.ones(200_000)
        works = []
        for turn in range(20):  # the ranks' threads come to the two groups in different orders
            groups = [(None, mine), (other, theirs)]
            for group, tensor in groups if (turn + rank) % 2 else groups[::-1]:
                works.append(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True))
        for work in works:
            work.wait()
        assert (mine == 1).all() and (theirs == 1).all()


def check_callbacks() -> None:
    """Callbacks of a future call collectives and wait for them, in the same order on all ranks, as over Gloo."""
    with process_groups() as (ours, gloo):
        assert _with_callbacks(gloo, 1) == _with_callbacks(ours, 1)
        rank, size = dist.get_rank(), dist.get_world_size()
        # Ranks come to the callbacks at different times: before and after the first collective has ended.
        for turn in range(8):
            delays = [0.03 * ((rank + turn) % size == at) for at in range(3)]
            found = _with_callbacks(ours, 4, delays)
            assert found == [size * (size * (at + 1) + at) for at in range(4)]
        expected = _with_late_futures(gloo, 0)
        for turn in range(6):
            assert _with_late_futures(ours, 0.03 * ((rank + turn) % size == 0)) == expected
        assert len([one for one in threading.enumerate() if one.name == "hvdkit-process-group"]) <= 3


def _with_late_futures(group: Any, delay: float) -> list[float]:
    """Two sums, and a third one in a callback of the first, whose future is taken after the second was called."""
    third = torch.full((4,), 100.0)

    def again(future: Any) -> Tensor:
        time.sleep(delay)
        return cast(Tensor, dist.all_reduce(third, group=group, async_op=True).get_future().wait()[0])

    sums = [torch.full((4,), 1.0), torch.full((4,), 10.0)]  # of the third one's size: they could be added to it
    works = [dist.all_reduce(one, group=group, async_op=True) for one in sums]
    time.sleep(delay)
    ended = works[0].get_future().then(again)
    works[1].wait()
    return [float(one[0]) for one in (*sums, ended.wait())]


def _with_callbacks(group: Any, count: int, delays: Sequence[float] = (0, 0, 0)) -> list[float]:
    """So many sums, each with a second one in a callback. delays: before the future, the callback and the second."""

    def begin(at: int) -> Any:
        def again(future: Any) -> Tensor:
            time.sleep(delays[2])
            second = future.value()[0][: at + 1] + at  # another size than the others: order matters
            dist.all_reduce(torch.ones(1), group=group)
            ended = dist.all_reduce(second, group=group, async_op=True).get_future().then(lambda one: one.value()[0])
            left = dist.all_reduce(torch.ones(3), group=group, async_op=True)  # nobody waits for it
            result = ended.wait()
            assert left is not None
            return cast(Tensor, result)

        work = dist.all_reduce(torch.full((9,), at + 1.0), group=group, async_op=True)
        time.sleep(delays[0])
        future = work.get_future()
        time.sleep(delays[1])
        return future.then(again)

    futures = [begin(at) for at in range(count)]
    if count > 1:  # over Gloo it could come before the callback's collectives on one rank, after them on another
        dist.barrier(group)
    return [float(future.wait()[0]) for future in futures]


def check_timeouts_in_callbacks() -> None:
    """What a callback waits for ends with the group's timeout; so does what waits for a callback that does not end."""
    torch.set_num_threads(1)
    dist.init_process_group("hvdkit")
    try:
        first, second = (dist.new_group(timeout=timedelta(seconds=4)) for _ in range(2))

        def alone(future: Any) -> Any:
            if dist.get_rank() == 0:
                return dist.all_reduce(future.value()[0], group=first, async_op=True).get_future().wait()
            return None

        waiting = dist.all_reduce(torch.ones(1), group=first, async_op=True).get_future().then(alone)
        if dist.get_rank() == 0:
            with pytest.raises(Exception, match="has waited 4 s for other ranks"):
                waiting.wait()
        dist.barrier()
        later: list[Any] = []
        called = threading.Event()

        def forward(_: Any) -> Any:
            called.wait()
            return later[0].wait()

        early = dist.all_reduce(torch.ones(300_000), group=second, async_op=True).get_future().then(forward)
        later.append(dist.all_reduce(torch.ones(1), group=second, async_op=True).get_future())
        called.set()
        with pytest.raises(Exception, match="has waited 4 s for a callback"):
            early.wait()
        dist.barrier()
    finally:
        dist.destroy_process_group()
        hvd.shutdown()


def check_groups() -> None:
    """The rows and columns of a mesh are groups of their own, and so is what some ranks alone make."""
    with process_groups() as (_, _gloo):
        rank, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        row, column = torch.tensor([rank]), torch.tensor([rank])
        dist.all_reduce(row, group=mesh["tp"].get_group())
        dist.all_reduce(column, group=mesh["dp"].get_group())
        assert int(row) == sum(each for each in range(size) if each // 2 == rank // 2)
        assert int(column) == sum(each for each in range(size) if each % 2 == rank % 2)
        if rank != 1:
            some = dist.new_group([0, *range(2, size)], use_local_synchronization=True)
            gathered = torch.empty(size - 1, dtype=torch.int64)
            dist.all_gather_into_tensor(gathered, torch.tensor([rank]), group=some)
            assert gathered.tolist() == [0, *range(2, size)]
        alone = [dist.new_group([each]) for each in range(size)][rank]
        own = torch.tensor([3.0])
        dist.all_reduce(own, group=alone)
        assert own == 3
        reversed_group = dist.new_group(list(range(size))[::-1])
        assert dist.get_group_rank(reversed_group, rank) in (rank, size - 1 - rank)
        said = torch.tensor([rank])
        dist.broadcast(said, src=1, group=reversed_group)
        assert said == 1


def check_refusals() -> None:
    """Arguments that cannot be are refused on each rank by itself, before anything is sent."""
    with process_groups():
        size = dist.get_world_size()
        cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (
                TypeError,
                "AVG of torch.int64|AVG of int64",
                lambda: dist.all_reduce(torch.ones(2).long(), dist.ReduceOp.AVG),
            ),
            (TypeError, "float8", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
            (TypeError, "is on meta", lambda: dist.all_reduce(torch.ones(2, device="meta"))),
            (ValueError, "pieces of 3", lambda: dist.all_gather_into_tensor(torch.ones(size * 3 + 1), torch.ones(3))),
            (ValueError, "do not fit", lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [9] * size, [])),
            (
                ValueError,
                "tag=40000|40000",
                lambda: _isend(torch.ones(2), (dist.get_rank() + 1) % size, tag=40_000),
            ),
        ]
        for kind, words, call in cases:
            with pytest.raises(kind, match=words):
                call()
        one = torch.ones(1)
        dist.all_reduce(one)  # the group goes on
        assert one == size


def check_beside_gloo() -> None:
    """Groups beside a default backend of another kind: of all ranks first, then of some."""
    hvd.init()
    dist.init_process_group("gloo")
    try:
        size = dist.get_world_size()
        if dist.get_rank() < 2:
            with pytest.raises(WorldError, match="needs a group of all ranks before"):
                dist.new_group([0, 1], backend="hvdkit", use_local_synchronization=True)
        everyone = dist.new_group(backend="hvdkit")
        some = dist.new_group(list(range(1, size)), backend="hvdkit")
        one = torch.ones(1)
        dist.all_reduce(one, group=everyone)
        assert one == size
        if dist.get_rank():
            dist.all_reduce(one, group=some)
            assert one == size * (size - 1)
    finally:
        dist.destroy_process_group()
        hvd.shutdown()


def check_on(transport: str) -> None:
    """Operations on another transport. transport: see torch_world.joined()."""
    with joined(transport), process_groups(shut_down=False) as (ours, gloo):
        rank, size = dist.get_rank(), dist.get_world_size()
        for count in (1, 70_001):
            mine = numbers(count, torch.float32, rank)
            _compare(_copies(ours, mine, rank, size), _copies(gloo, mine, rank, size))
            for dtype in (torch.float64, torch.bfloat16, torch.int32):
                wanted, found = numbers(count, dtype, rank), numbers(count, dtype, rank)
                whole, part = torch.cat([found] * size), torch.empty_like(found)
                dist.all_reduce(wanted, group=gloo)
                dist.all_reduce(found, group=ours)
                dist.reduce_scatter_tensor(part, whole, group=ours)
                same(found, wanted, tolerance_of(dtype))
                same(part, wanted, tolerance_of(dtype))
        some = dist.new_group([0, 2, 3])
        if rank != 1:
            row = torch.tensor([rank])
            dist.all_reduce(row, group=some)
            assert row == 5


def lose_rank_1(how: str) -> str:
    """Rank 1 is killed; what the others are told. how: what they do meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("hvdkit")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, 1])
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and how in ("subgroup", "message"):
        return ""  # a rank that does not wait for rank 1
    calls: dict[str, Callable[[], object]] = {
        "collective": lambda: dist.all_reduce(tensor),
        "asynchronous": lambda: _wait(dist.all_reduce(tensor, async_op=True)),
        "subgroup": lambda: dist.all_gather_into_tensor(torch.empty(200_000), tensor, group=group),
        "barrier": lambda: dist.barrier(),
        "message": lambda: dist.recv(tensor, 1),
    }
    try:
        calls[how]()
    except RankLostError as error:
        return str(error)
    raise AssertionError(f"nobody was missed among {size}")


def _wait(work: Any) -> None:
    work.wait()
