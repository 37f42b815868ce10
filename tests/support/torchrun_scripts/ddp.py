"""DistributedDataParallel."""

import torch
import torch.distributed as dist
from problem import BATCH, RATE, make_data, make_model, report
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group()
data = make_data()
loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
report(dist.get_rank(), dist.get_world_size(), list(model.parameters()))
dist.destroy_process_group()
