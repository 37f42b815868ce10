"""clip_grad_norm_() of a model whose parameters are on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from hvdkit.torch.parallel.mesh import Mesh, take_mesh


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, *, mesh: Mesh | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Scale gradients so that the norm over the whole model is at most max_norm; returns the norm, as ().

    As torch.nn.utils.clip_grad_norm_ (2-norm) with all parameters on one rank, for models after any of shard(),
    tensor_parallel() and pipeline(); a collective call of all ranks. With DistributedOptimizer call it after
    backward().

    parameters: this rank's.
    max_norm: upper limit.
    mesh: of the model; None for the newest one.
    eps: added to the norm in the division.
    """
    mesh = take_mesh(mesh, "clip_grad_norm_()")
    squares = torch.zeros((), device=mesh.device)
    shards = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        parts, local = 1, parameter.grad
        if isinstance(parameter.grad, DTensor):
            gradient = parameter.grad = _summed(parameter.grad)
            local = gradient.to_local()
            sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            parts = math.prod(size for placement, size in sizes if placement != Replicate())
        shards.append(local)
        # The ranks of a stage have dp * tp gradients of this parameter, `parts` of them different.
        squares += torch.linalg.vector_norm(local, dtype=torch.float32).to(mesh.device) ** 2 * parts
    dist.all_reduce(squares)
    total = (squares / (mesh.dp * mesh.tp)).sqrt()
    factor = torch.clamp(max_norm / (total + eps), max=1.0)
    for local in shards:
        local.mul_(factor.to(local.device))
    return total


def _summed(gradient: DTensor) -> DTensor:
    """Return the gradient after summing partial gradients over ranks."""
    placements = [Replicate() if isinstance(each, Partial) else each for each in gradient.placements]
    return gradient.redistribute(placements=placements)
