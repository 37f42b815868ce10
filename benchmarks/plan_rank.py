"""What a rank of benchmarks.plan_ranks does: steps of a small GPT, divided as a layout says, by torch's own parts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import hvdkit.torch  # noqa: F401 - it makes the backend known
from hvdkit_planner.layout import Transformer

STEPS = 12


class Block(nn.Module):
    """A layer of GPT without dropout. heads: of this rank."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer. x: samples x tokens x hidden."""
        normed = self.first(x)
        query, key, value = (
            each(normed).unflatten(-1, (self.size, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(context)
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return result


def build_stage(model: Transformer, tp: Any, pp: int, stage: int) -> nn.Sequential:
    """Build a stage's part of the model. tp: the mesh of its tensor-parallel ranks."""
    heads = model.heads // tp.size()
    blocks = [Block(model.hidden, heads) for _ in range(model.layers // pp)]
    names = {"query": 0, "key": 0, "value": 0, "up": 0, "out": 1, "down": 1}
    for block in blocks if tp.size() > 1 else []:
        parallelize_module(
            block, tp, {name: RowwiseParallel() if by else ColwiseParallel() for name, by in names.items()}
        )
    first = [nn.Embedding(model.vocabulary, model.hidden)] if stage == 0 else []
    last = [nn.LayerNorm(model.hidden), nn.Linear(model.hidden, model.vocabulary)] if stage == pp - 1 else []
    return nn.Sequential(*first, *blocks, *last)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_local(each).nbytes for each in tensors)


def main() -> None:
    """Train, and write from rank 0 the seconds of the fastest step, of the slowest rank, and the largest rank's state.

    The state is in bytes: parameters, and what the optimizer keeps for them.
    """
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("hvdkit")
    dp, tp, pp = task["layout"]
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    model = Transformer(**task["model"])
    stage = mesh["pp"].get_local_rank()
    part = build_stage(model, mesh["tp"], pp, stage)
    optimizer = torch.optim.Adam(part.parameters())
    words = torch.randint(model.vocabulary, (task["batch"] // dp, model.sequence))
    count = len(words) // task["micro_batch"]

    def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())

    schedule = None
    if pp > 1:
        own = pipelining.PipelineStage(part, stage, pp, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = pipelining.Schedule1F1B(own, count, loss_fn=loss_of)

    def step() -> None:
        optimizer.zero_grad()
        if schedule is None:
            for some in words.chunk(count):
                loss_of(part(some), some).backward()
        else:
            ends: dict[str, Any] = {"target": words} if stage == pp - 1 else {}
            schedule.step(*([words] if stage == 0 else []), **ends)
        if dp > 1:
            gradients = [_local(each.grad) for each in part.parameters() if each.grad is not None]
            flat = torch.cat([each.flatten() for each in gradients])
            dist.all_reduce(flat, group=mesh["dp"].get_group())
            for each, summed in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                each.copy_(summed.view_as(each))
        optimizer.step()

    seconds = []
    for _ in range(STEPS + 2):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    kept = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    state = torch.tensor([_nbytes(part.parameters()), _nbytes(kept)])
    dist.all_reduce(state, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        parameters, moments = state.tolist()
        found = {"seconds": min(seconds[2:]), "parameters": parameters, "optimizer": moments}
        Path(task["output"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
