"""fully_shard: parameters, gradients and optimizer state in shards."""

import torch
import torch.distributed as dist
from problem import BATCH, RATE, make_data, make_model, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
data = make_data()
loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=False))
model = make_model()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
report(dist.get_rank(), dist.get_world_size(), [one.full_tensor() for one in model.parameters()])
dist.destroy_process_group()
