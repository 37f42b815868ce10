"""A training whose DataLoader forks workers while hvdkit's threads run; ends without shutdown(). argv: a case.

workers: all is well, each epoch with new workers and with the same. fork: a child of the rank's own ends at once, as
children should, while an operation is under way. calls: such a child calls collectives.
dies: a worker ends in the middle of an epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import hvdkit.torch as hvd
from hvdkit.errors import TransportError


class Rows(Dataset[torch.Tensor]):
    """64 rows of 8 numbers; in the case "dies" a worker asked for row 43 is gone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        if sys.argv[1] == "dies" and at == 43 and get_worker_info() is not None:
            os._exit(3)
        return torch.full((8,), at / 64)


def is_answered(call: Callable[[], object]) -> bool:
    """Does a call not raise in a forked child?"""
    try:
        call()
    except TransportError as error:
        return f"forked from rank {hvd.rank()}" not in str(error)
    return True


def count_answered(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many collectives do not raise in a forked child; those that need a new engine or plan, too."""

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()

    calls: list[Callable[[], object]] = [
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allreduce(torch.ones(1), process_set=hvd.global_process_set),
        hvd.barrier,
        hvd.join,
        step,
    ]
    answered = sum(map(is_answered, calls))
    hvd.shutdown()
    return answered


def main() -> None:
    """Train."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    handle = hvd.allreduce_async(torch.ones(10), name="under way") if hvd.rank() == 0 else None
    if sys.argv[1] in ("fork", "calls"):
        child = os.fork()
        if not child:
            os._exit(0 if sys.argv[1] == "fork" else count_answered(model, optimizer))
        assert os.waitpid(child, 0)[1] == 0
    hvd.synchronize(handle if handle is not None else hvd.allreduce_async(torch.ones(10), name="under way"))
    for persistent in (False, True):
        loader = DataLoader(
            Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent
        )
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                (model(batch) - 1).square().mean().backward()
                optimizer.step()
    sum_of_all = hvd.allreduce(model.weight.detach(), op=hvd.Sum) - hvd.size() * model.weight.detach()
    sys.stdout.write(f"rank {hvd.rank()} done, {sum_of_all.abs().max().item():.6f} apart\n")


if __name__ == "__main__":
    main()
