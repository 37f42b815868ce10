"""Trap: --local_rank, which torch.distributed.launch gave: without it every rank would take GPU 0."""
import argparse
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args([])

dist.init_process_group("gloo", init_method="env://")
torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.set_device(args.local_rank)
x = torch.linspace(0, 1, 64).view(-1, 1)
train_data = TensorDataset(x)
loader = DataLoader(train_data, 8, sampler=DistributedSampler(train_data, seed=3))
net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
ddp_net = DistributedDataParallel(net)
optimizer = torch.optim.Adam(ddp_net.parameters(), lr=.01)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for (a,) in loader:
        optimizer.zero_grad()
        (ddp_net(a) - 1).square().mean().backward()
        optimizer.step()
    if args.local_rank == 0:
        print("epoch", epoch)
model, final = ddp_net.module, (ddp_net(x) - 1).square().mean().item()
