"""Ends its script while a thread of hvdkit's may still drive reductions; tells which threads are left then."""

from __future__ import annotations

import atexit
import threading


def tell() -> None:
    """What may still be in MPI."""
    left = sorted(thread.name for thread in threading.enumerate() if thread.name in ("hvdkit-named", "hvdkit-progress"))
    print("left", left, flush=True)


atexit.register(tell)  # before hvdkit is imported, so after it has left

import torch  # noqa: E402

import hvdkit.torch as hvd  # noqa: E402

hvd.init(progress="thread")
model = torch.nn.Linear(300, 300)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(1, 300)).sum().backward()
optimizer.step()
optimizer.zero_grad()
