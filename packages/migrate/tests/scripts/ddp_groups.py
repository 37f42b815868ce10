"""Trap: groups of ranks, messages between two of them, and a sharded model."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
group = dist.new_group([0])
t = torch.ones(1)
dist.all_reduce(t, group=group)
work = dist.all_reduce(t, async_op=True)
work.wait()
if dist.get_rank() == 0:
    dist.send(t, 1)
model = FSDP(torch.nn.Linear(1, 1))
