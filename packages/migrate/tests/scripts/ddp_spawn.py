"""Trap: the script starts its processes itself."""
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12355'
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def demo(rank, world_size):
    setup(rank, world_size)
    model = DDP(torch.nn.Linear(4, 2).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    model(torch.randn(20, 4)).sum().backward()
    optimizer.step()
    cleanup()


if __name__ == "__main__":
    mp.spawn(demo, args=(2,), nprocs=2, join=True)
