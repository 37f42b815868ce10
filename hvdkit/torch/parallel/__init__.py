"""Sharding, tensor parallelism, pipelines and recomputation for PyTorch, on torch's own modules: `hvdkit.parallel`."""

from __future__ import annotations

from torch.distributed.tensor.parallel import loss_parallel

from hvdkit.torch.parallel.checkpoint import load, save
from hvdkit.torch.parallel.clipping import clip_grad_norm_
from hvdkit.torch.parallel.mesh import Mesh, init
from hvdkit.torch.parallel.pipeline import Pipeline, pipeline
from hvdkit.torch.parallel.sharding import recompute, shard
from hvdkit.torch.parallel.tensor import tensor_parallel

__all__ = [
    "Mesh",
    "Pipeline",
    "clip_grad_norm_",
    "init",
    "load",
    "loss_parallel",
    "pipeline",
    "recompute",
    "save",
    "shard",
    "tensor_parallel",
]
