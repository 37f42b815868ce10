"""Trap: torchrun's variables, and collectives for metrics."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(rank)
    x = torch.linspace(0, 1, 90).view(-1, 1)
    data = TensorDataset(x, 2 * x)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = torch.nn.Linear(1, 1).to(device)
    model = DDP(model, device_ids=[local_rank] if torch.cuda.is_available() else None, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            loss = ((model(a.to(device)) - b.to(device)) ** 2).mean()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        total /= world_size
        gathered = [torch.zeros_like(total) for _ in range(world_size)]
        dist.all_gather(gathered, total)
        if rank == 0:
            print(epoch, total.item(), len(gathered))
            torch.save(model.module.state_dict(), "model.pt")
        dist.barrier()
    net = model.module
    dist.destroy_process_group()
    return net, ((net(x.to(device)) - 2 * x.to(device)) ** 2).mean().item()


if __name__ == "__main__":
    model, final = main()
