"""Memory of a rank on its device, as JSON: `hvdrun -np 2 python -m benchmarks.first_gpu.memory DEVICE FILE`.

A model of 64 MiB of float32 parameters takes some steps of SGD with momentum, without hvdkit and with it. On a GPU the
number is torch's largest allocation; what NCCL itself allocates is the rest of what the driver reports.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

import hvdkit.torch as hvd

_STEPS = 3
_MIB = 2**20


def main() -> None:
    """Measure, and write what rank 0 has measured."""
    device, result = torch.device(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    if device.type == "cuda":
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model = nn.Sequential(*(nn.Linear(1024, 1024, device=device) for _ in range(16)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    facts = {"parameters, MiB": sum(each.nbytes for each in model.parameters()) / _MIB}
    facts.update(_measure("without hvdkit", model, optimizer, device))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    facts.update(_measure("with hvdkit", model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), device))
    if hvd.rank() == 0:
        result.write_text(json.dumps(facts, indent=1))


def _measure(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, float]:
    """Take steps; returns the largest memory during them, in MiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.ones(8, 1024, device=device)).square().mean().backward()
        optimizer.step()
    if device.type != "cuda":
        return {f"{name}, MiB of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MIB}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        f"{name}, MiB by torch": torch.cuda.max_memory_allocated(device) / _MIB,
        f"{name}, MiB in use on the GPU": (total - free) / _MIB,
    }


if __name__ == "__main__":
    main()
