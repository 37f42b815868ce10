"""Training over the stand-in for CUDA and NCCL: torch computes on the CPU, which stands for the GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from stand_in import open_stand_in, stand_in_path, synchronizations
from torch_world import Case, Weights, train_on_ranks

from hvdkit.torch import gpu
from hvdkit.torch.tensors import DTYPES, TensorBuffer
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.gpu_driver import GpuDevice
from hvdkit.transport.nccl import groups

#: Settings of init() under which only NCCL will do.
NCCL = {"device_transport": "nccl"}


def _allocate(count: int, dtype: str) -> Buffer:
    return TensorBuffer(torch.zeros(count, dtype=DTYPES[dtype]), dtype)


#: torch gives memory of a stream's pool away in the order of that stream; here it stays.
_pool: list[torch.Tensor] = []


def _make_on_stream(count: int, dtype: torch.dtype, value: float | None, _: int, __: int) -> torch.Tensor:
    _pool.append(torch.empty(count, dtype=dtype) if value is None else torch.full((count,), value, dtype=dtype))
    return _pool[-1]


@contextmanager
def stand_in_gpu() -> Iterator[dict[str, Any]]:
    """Within, torch's tensors count as those of a GPU. Yields settings for init()."""
    path = stand_in_path()

    @functools.cache
    def open_device(index: int, _: object = None) -> GpuDevice:
        return open_stand_in(index)

    with (
        mock.patch.object(gpu, "is_cuda_build", lambda: True),
        mock.patch.object(gpu, "common_gpu", lambda _: 0),
        mock.patch.object(gpu, "current_stream", lambda _: 0),
        mock.patch.object(gpu, "make_allocate", lambda _: _allocate),
        mock.patch.object(gpu, "is_on_host", lambda _: False),
        mock.patch.object(gpu, "current_gpu", lambda: 0),
        mock.patch.object(gpu, "device", lambda _: torch.device("cpu")),
        mock.patch.object(gpu, "make_on_stream", _make_on_stream),
        mock.patch.object(gpu, "record_use", lambda _, __: None),
        mock.patch.object(gpu, "open_device", open_device),
        mock.patch.object(groups, "open_device", open_device),
    ):
        yield {**NCCL, "nccl_library": path}


def train_on_gpus(case: Case, **more: Any) -> Weights:
    """See train_on_ranks: on the stand-in, without a wait of the host for the device."""
    with stand_in_gpu() as settings:
        before = synchronizations()
        weights = train_on_ranks(case, "auto", {**settings, **more.pop("settings", {})}, **more)
        assert synchronizations() == before
    return weights
