"""Trap: gradients of some backward passes are not reduced; ranks are known from `args`."""
import os
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def init():
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    return int(os.getenv("RANK", "0"))


def train(model, loader, optimizer):
    for i, (a,) in enumerate(loader):
        if i % 2 == 0:
            with model.no_sync():
                (model(a) - 1).square().mean().backward()
        else:
            (model(a) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def run():
    rank = init()
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 64).view(-1, 1)
    data = TensorDataset(x)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
    net = DDP(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=.05)
    for _ in range(3):
        train(net, loader, optimizer)
    state = [None] * distributed.get_world_size()
    distributed.all_gather_object(state, rank)
    return net.module, (net(x) - 1).square().mean().item()


model, final = run()
