"""An allreduce in bucket memory, where gradients are reduced in place: what hvdkit costs without the copy into it."""

from __future__ import annotations

import time

import torch

from hvdkit.engine import runtime as engine
from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.buckets import Buckets, BucketSpec


def open_buckets(tensor: torch.Tensor) -> Buckets:
    """Buckets of the usual size that hold as much as the tensor together; collective, and so is closing them."""
    made, flat = engine.runtime("the benchmark"), as_buffer(tensor)
    piece = max(1, made.config.fusion_bytes // flat.array.itemsize)
    counts = [min(piece, flat.count - at) for at in range(0, flat.count, piece)]
    return made.transport.open_buckets([BucketSpec(flat.dtype, count) for count in counts])


def reduce_buckets(buckets: Buckets, tensor: torch.Tensor) -> float:
    """A round of all buckets; the seconds before it, in which they were filled from a tensor on all ranks.

    Every rank writes its buckets anew, as a backward pass would.
    """
    made, flat = engine.runtime("the benchmark"), as_buffer(tensor)
    began, at = time.perf_counter(), 0
    for memory in buckets.memory:
        made.transport.arithmetic.copy(memory, flat.slice(at, at + memory.count))
        at += memory.count
    made.transport.barrier()
    filling = time.perf_counter() - began
    for index in range(len(buckets.memory)):
        buckets.start(index)
    for index in range(len(buckets.memory)):
        buckets.wait(index)
    return filling
