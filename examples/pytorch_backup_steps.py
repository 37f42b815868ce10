"""Handwritten digits, with steps that do not wait for the slowest rank: its gradients are dropped if they come late.

    hvdrun -np 3 python pytorch_backup_steps.py --slow-ms 40

--slow-ms makes one rank slower by so many milliseconds in each step, another rank each time.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd  # hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--drop", type=int, default=1, help="of how many ranks a step does not wait")
parser.add_argument("--slow-ms", type=float, default=0.0)
options = parser.parse_args()

hvd.init()  # hvd
torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels))
inputs, targets = torch.tensor(images / 16).float()[order], torch.tensor(labels)[order]
data = TensorDataset(inputs[:1437], targets[:1437])
sampler = hvd.data.ShardedSampler(data)  # hvd
loader = DataLoader(data, 32, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
drop = min(options.drop, hvd.size() - 1)
optimizer = hvd.BackupSteps(optimizer, model.named_parameters(), drop=drop)  # hvd

step = 0
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        step += 1
        optimizer.zero_grad()
        if optimizer.behind:
            optimizer.synchronize()  # hvd: the other ranks have made this step already
        else:
            time.sleep(options.slow_ms / 1000 * (step % hvd.size() == hvd.rank()))
            nn.functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the average that all ranks have
        optimizer.step()

optimizer.finish()  # hvd: all ranks have taken all steps now
dropped = hvd.allgather_object(optimizer.dropped)  # hvd
if hvd.rank() == 0:  # hvd
    with torch.no_grad():
        right = model(inputs[1437:]).argmax(1) == targets[1437:]
    print(f"gradients dropped of each rank: {dropped} in {step} steps")
    print(f"test accuracy {100 * right.double().mean():.1f} %")
