"""Named operations by process groups of torch: Gloo's on the CPU, with the code that runs those of GPUs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
from device_world import TORCH
from ranks import RanksFailedError, run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.errors import HorovodInternalError, RanksDisagreeError
from hvdkit.torch import collective as module
from hvdkit.torch.device import operations

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.native("Horovod's core reduces tensors by itself"),
]

_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_ON_DEVICE = [*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.complex64, torch.complex128]


def _no_host_copy(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a tensor was copied to host memory")


def _same(result: torch.Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=result.dtype).expand(result.shape)
    torch.testing.assert_close(result, expected)


def _kinds() -> None:
    """Every kind, without a copy to host memory."""
    with joined(**TORCH), mock.patch.object(module, "to_host", _no_host_copy):
        rank, size = hvd.rank(), hvd.size()
        everyone = list(range(1, size + 1))
        for dtype in _ON_DEVICE:
            x = torch.full((2, 3), rank + 1, dtype=dtype)
            _same(hvd.allreduce(x, op=hvd.Sum), sum(everyone))
            _same(x, rank + 1)
            if not dtype.is_complex:
                _same(hvd.allreduce(x, op=hvd.Min), 1)
                _same(hvd.allreduce(x, op=hvd.Max), size)
                _same(hvd.allreduce(x, op=hvd.Product), 6 if size == 3 else 2)
            if dtype.is_floating_point or dtype.is_complex:
                _same(hvd.allreduce(x), (size + 1) / 2)
                _same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4), 2 * sum(everyone))
                _same(hvd.reducescatter(torch.stack([x[0]] * (size + 1))), (size + 1) / 2)
            _same(hvd.broadcast(x, size - 1), size)
            rows = torch.full((rank, 2), rank, dtype=dtype)  # rank 0 has none
            assert hvd.allgather(rows)[:, 0].tolist() == [one for one in range(size) for _ in range(one)]
            assert hvd.allgather(x).shape == (2 * size, 3)
            received, counts = hvd.alltoall(x.repeat(size, 1)[: size + 1], splits=[2, *[1] * (size - 1)])
            assert counts.tolist() == [2 if rank == 0 else 1] * size
            assert received[:: 2 if rank == 0 else 1, 0].tolist() == everyone
            for whole in (torch.stack([x] * size), torch.stack([x] * (size + 1))):
                part = hvd.reducescatter(whole, op=hvd.Sum)
                assert len(part) == len(whole) // size + (rank < len(whole) % size)
                _same(part, sum(everyone))
        bools = torch.tensor([rank == 0, True, False])
        assert hvd.allreduce(bools, op=hvd.Sum).tolist() == [True, True, False]
        assert hvd.allreduce(bools, op=hvd.Min).tolist() == [False, True, False]
        handles = [hvd.allreduce_async(torch.full((5,), float(one)), op=hvd.Sum) for one in range(70)]
        for one, handle in enumerate(handles):
            _same(hvd.synchronize(handle), float(one * size))
        y = torch.ones(4, 4)
        hvd.allreduce_(y[:, 1], op=hvd.Sum)  # not contiguous
        assert y.sum() == 12 + 4 * size
        z = torch.ones(3, requires_grad=True)
        (hvd.allreduce(z, op=hvd.Sum) * (rank + 1)).sum().backward()
        assert z.grad is not None
        _same(z.grad, sum(everyone))


@pytest.mark.slow
def test_all_kinds_stay_on_the_device() -> None:
    run_ranks(3, _kinds)


def _hosts_work() -> None:
    """Operations that no process group can do, and those of ranks whose devices cannot be used together."""
    with joined(**TORCH):
        x = torch.full((3,), 2 * hvd.rank() + 1, dtype=torch.int32)
        _same(hvd.allreduce(x), 3)
        _same(hvd.allreduce(x.short(), op=hvd.Sum), 9)
        _same(hvd.allreduce(x.double(), op=hvd.Max, postscale_factor=2.0), 10)
    with joined(**TORCH), mock.patch.object(operations, "open_group", lambda *_: None):
        x = torch.full((2, 2), float(hvd.rank()))
        _same(hvd.allreduce_(x, op=hvd.Sum), 3)
        _same(x, 3)
        _same(hvd.allgather(x), 3)
        _same(hvd.broadcast(x * hvd.rank(), 1), 3)


def test_operations_that_no_process_group_can_do_go_through_the_host() -> None:
    run_ranks(3, _hosts_work)


def _set_and_join() -> None:
    with joined(**TORCH):
        rank, pair = hvd.rank(), hvd.add_process_set([0, 2])
        if rank != 1:
            _same(hvd.allreduce(torch.full((4,), float(rank)), process_set=pair), 1)
        if rank == 2:
            hvd.join()
        else:
            x = torch.full((4,), float(rank + 1))
            _same(hvd.allreduce(x, op=hvd.Sum), 3)
            _same(hvd.allreduce(x, op=hvd.Min), 1)
            _same(hvd.allreduce(-x, op=hvd.Max), -1)
            _same(hvd.allreduce(x, op=hvd.Product), 2)
            hvd.join()


def test_process_sets_and_joined_ranks() -> None:
    run_ranks(3, _set_and_join)


def _norm() -> None:
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    plain = torch.nn.BatchNorm1d(4).train()
    expected = plain(whole)
    with joined(**TORCH), mock.patch.object(module, "to_host", _no_host_copy):
        part = slice(3 * hvd.rank(), 3 * hvd.rank() + 3)
        mine = whole[part].clone().requires_grad_()
        result = hvd.SyncBatchNorm(4).train()(mine)
        torch.testing.assert_close(result, expected[part])
        result.square().sum().backward()


def test_sync_batch_norm_stays_on_the_device() -> None:
    run_ranks(2, _norm)


def _disagree() -> None:
    with joined(**TORCH):
        with mock.patch.object(operations, "stays_on_host", lambda _: hvd.rank() == 1):
            with pytest.raises(
                RanksDisagreeError, match=r"about the device: rank 0 .*has cpu \(torch\), rank 1 .*has cpu"
            ):
                hvd.allreduce(torch.ones(3))
            with pytest.raises(RanksDisagreeError, match="device"):
                hvd.allgather(torch.ones(3))
        _same(hvd.allreduce(torch.ones(3), op=hvd.Sum), 2)


def test_ranks_that_disagree_about_the_device_are_told() -> None:
    run_ranks(2, _disagree)


def _killed() -> float:
    with joined(**TORCH):
        hvd.allreduce(torch.ones(3))
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(HorovodInternalError):
            while time.monotonic() < began + 30:
                hvd.allreduce(torch.ones(3))
        raise RuntimeError(f"raised after {time.monotonic() - began:.1f} s")


@pytest.mark.slow
def test_a_killed_rank_is_an_error_on_the_other() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(2, _killed, fresh=True, timeout=60)
    assert "raised after" in failed.value.tracebacks.get(0, ""), failed.value
