"""Trap: Horovod's inner paths beside the usual one."""
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce, Average
from horovod.common.util import gloo_built
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())   # one GPU each
x = torch.linspace(0, 1, 64).view(-1, 1)
data = TensorDataset(x)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, 8, sampler=sampler)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.05 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (a,) in loader:
        optimizer.zero_grad()
        (model(a) - 1).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
final = allreduce((model(x) - 1).square().mean().detach(), op=Average).item()
