"""fit(steps_per_epoch=...) over arrays and Sequences: each epoch starts at the first batch, and repeats if necessary.

Keras 3 continues where the last epoch stopped, and ends an epoch early when the data ends. On TensorFlow it accepts no
list of inputs or targets from a Sequence or a generator, so such a list is passed as a tuple.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def apply(keras: ModuleType) -> None:
    """Patch Keras's iterator over epochs and its data adapters."""
    iterators = importlib.import_module("keras.src.trainers.epoch_iterator").EpochIterator
    adapters = importlib.import_module("keras.src.trainers.data_adapters")
    kinds = tuple(
        getattr(adapters, name) for name in ("ArrayDataAdapter", "PyDatasetAdapter") if hasattr(adapters, name)
    )
    own = iterators._enumerate_iterator
    sequences, generators = adapters.PyDatasetAdapter, adapters.GeneratorDataAdapter
    own_batch, own_init = sequences._standardize_batch, generators.__init__
    sequences._standardize_batch = lambda self, batch: own_batch(self, tuples(batch))
    generators.__init__ = lambda self, generator: own_init(self, map(tuples, generator))

    def enumerate_steps(self: Any) -> Iterator[Any]:
        if not (self.steps_per_epoch and self._num_batches and isinstance(self.data_adapter, kinds)):
            yield from own(self)
            return
        self.data_adapter.on_epoch_begin()
        each = self.steps_per_execution
        self._current_iterator, self._steps_seen = iter(self._get_iterator()), 0
        for step in range(0, self.steps_per_epoch, each):
            if self._steps_seen >= self._num_batches:
                self._current_iterator, self._steps_seen = iter(self._get_iterator()), 0
            self._steps_seen += each
            yield step, step + each - 1, self._current_iterator
        self._current_iterator = None
        self.data_adapter.on_epoch_end()

    iterators._enumerate_iterator = enumerate_steps


def tuples(batch: Any) -> Any:
    """Return a batch with its lists of arrays as tuples."""
    if not isinstance(batch, (list, tuple)):
        return batch
    return tuple(
        tuple(part) if isinstance(part, list) and all(hasattr(one, "shape") for one in part) else part for part in batch
    )
