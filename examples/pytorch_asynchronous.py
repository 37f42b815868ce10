"""Handwritten digits, with ranks that step at their own pace: none waits unless it is too far ahead.

    hvdrun -np 3 python pytorch_asynchronous.py --slow-ms 40

--slow-ms makes the last rank slower by so many milliseconds a step.
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
parser.add_argument("--staleness", type=int, default=4)
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
optimizer = hvd.AsynchronousOptimizer(optimizer, model.named_parameters(), staleness=options.staleness)  # hvd

for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        if hvd.rank() == hvd.size() - 1:
            time.sleep(options.slow_ms / 1000)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

optimizer.finish()  # hvd: all ranks have the same parameters now
if hvd.rank() == 0:  # hvd
    with torch.no_grad():
        right = model(inputs[1437:]).argmax(1) == targets[1437:]
    print(f"test accuracy {100 * right.double().mean():.1f} %")
