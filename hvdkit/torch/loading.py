"""Recording of the time that training waits for torch's DataLoaders, for profiles."""

from __future__ import annotations

import functools

from torch.utils.data import DataLoader, dataloader

from hvdkit.profiling.loading import time_method


@functools.cache
def watch_loaders() -> None:
    """Count the creation of an iterator and each batch of every DataLoader as waiting for data."""
    time_method(DataLoader, "__iter__", loaders="num_workers")
    time_method(dataloader._BaseDataLoaderIter, "__next__", loaders="_num_workers")
