"""While steps are recorded: how long training waits for torch's DataLoaders."""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch.utils.data import DataLoader, dataloader

from hvdkit.engine.observe.recording import RECORDER, clock


@functools.cache
def watch_loaders() -> None:
    """Note the time that making an iterator, and each batch, takes; of every DataLoader of the process."""
    loader: Any = DataLoader
    iterator: Any = dataloader._BaseDataLoaderIter
    iterate, advance = loader.__iter__, iterator.__next__

    def __iter__(self: Any) -> Any:
        began = clock()
        try:
            return iterate(self)
        finally:
            _loaded(began, self.num_workers)

    def __next__(self: Any) -> Any:
        began = clock()
        try:
            return advance(self)
        finally:
            _loaded(began, self._num_workers)

    loader.__iter__ = __iter__
    iterator.__next__ = __next__


def _loaded(began: float, workers: int) -> None:
    if threading.current_thread() is threading.main_thread():  # else somebody loads ahead, and training does not wait
        RECORDER.loading(began, clock(), workers)
